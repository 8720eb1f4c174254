"""The native relay: passes the middle of streamed answers on without the interpreter.

``relay.c`` is built where there is a compiler, or comes with a wheel; without it the same bytes pass ``router.http``.
"""
