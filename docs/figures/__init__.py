"""The figures of the documentation, drawn from the code that they show.

`python -m docs.figures`, from the project's folder, draws them into `docs/images/`.
"""
