"""The scheduling core: what to do. Pure: values in, decisions out; no I/O, no clock, no hidden randomness.

The path of a request through it: ``prompts`` cuts its prompt into a chain; ``state`` holds the hash key's candidate
pair and what runs where; ``placing`` decides where it goes, by weights over ``estimates``; ``queues`` decides when it
is sent; ``request`` decides what its answer means. ``scaling`` decides how many instances there are. The modules beside
these folders are what all of them stand on. ``tests/test_packages.py`` has the order in which the folders may import
each other.
"""
