"""The ``dualmap`` command. Imports every package; no package imports it."""
