"""Imported once by the ranks' fork server: Megatron's parser takes a third of a second to build,
most of it to read the help of its flags off the source of its dataclasses, and a training run
builds it three times. Here the help is read once, for all ranks.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

_upstream = ArgumentGroupFactory._get_field_docstrings
_known: dict[type, dict[str, str]] = {}


def _docstrings(factory: Any, source: type) -> dict[str, str]:
    if source not in _known:
        _known[source] = _upstream(factory, source)
    return dict(_known[source])


ArgumentGroupFactory._get_field_docstrings = _docstrings
add_megatron_arguments(ArgumentParser())
