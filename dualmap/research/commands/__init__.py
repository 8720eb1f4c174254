"""The commands of research: ``dualmap evaluate`` and ``dualmap laboratory``."""
