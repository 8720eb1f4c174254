"""The one package that is installed: a fleet of routers for LLM serving.

A wheel has all of its parts but ``dualmap.research``. Paths in docstrings and comments begin in this folder.
"""
