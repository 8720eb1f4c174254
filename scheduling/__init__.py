"""The scheduling core: what to do. Pure: values in, decisions out; no I/O, no clock, no hidden randomness.

A request's way through it: ``prompt`` renders its body, ``blocks`` cuts it into a chain, ``hotness`` finds the
hash key, ``ring`` the candidate pair (both through ``view``), ``policies`` decide from loads with ``ttft``. For the
leader: ``rebalance``, ``evacuation``, ``lifecycle`` and ``HotnessWindow``. For each replica: ``breaker``.
"""
