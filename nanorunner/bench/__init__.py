"""`python -m nanorunner bench`: measure the engine, and say what each number is.

cli.py lists the commands; metrics.py defines every figure; result.py is the form of a result file.
"""
