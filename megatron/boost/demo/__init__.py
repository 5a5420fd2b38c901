"""The demo: three trainings of one recipe, compared in a table and a report.

`recipe` says what is trained, `launch` runs a training and follows it, `results` reads what it
measured, `table`, `curves` and `report` show that, `progress` shows how far things are, and `run`
joins them.
"""
