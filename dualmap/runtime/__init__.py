"""The process and its surroundings: clock, open files, trusted certificates, the installed package, and its pools."""
