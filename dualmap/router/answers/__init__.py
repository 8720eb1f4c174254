"""An answer, from its head to its end: pure rules. Bytes and times are arguments.

HTTP and the picker drive the machine of an answer; what is kept of one, its events, its checks and its rest have a file
each.
"""
