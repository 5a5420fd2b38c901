"""What `tools/plan.py` prints, a module for each of its modes."""
