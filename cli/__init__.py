"""The front door: the ``dualmap`` command. Knows every room, is known by none."""
