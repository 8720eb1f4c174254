"""The figures of runs, and how they are shown: tables, lines of text and plots."""
