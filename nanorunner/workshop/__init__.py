"""The workshop: commands that show what the runtime does inside, break it, and ask questions.

cli.py lists the commands. Nothing of the runtime imports this package, and each command is imported
only when it is run.
"""
