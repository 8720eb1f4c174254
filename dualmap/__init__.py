"""The one package that is installed: a fleet of routers for LLM serving.

Its parts lie at the top of the repository, and the links beside this file give them their names: ``router/`` is
``dualmap.router``. A wheel holds the folders themselves in place of the links, and no ``dualmap.research``.
"""
