"""A module with a layer spec that does not import."""

import no_such_package  # noqa: F401
