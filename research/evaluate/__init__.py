"""The paper's evaluation: every experiment as data, tables and plots, in one report."""
