"""The simulation's commands, for a command line.

Each module offers ``add_arguments(parser)`` and ``run(arguments, scheduling, engine) -> exit code``; wrong input
prints the file, the line and the reason and returns 2, with nothing written.
"""
