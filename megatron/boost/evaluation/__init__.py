"""Measuring models on text, and letting them write some: what tools/evaluate.py and
tools/generate.py are made of."""
