"""Build entry; the metadata and the settings of the tools stand in pyproject.toml."""

from setuptools import setup

setup()
