"""Parameters that every admin endpoint starts from: the runtime, and the pool that the query names."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from dualmap.router.errors import InvalidRequestError, NotFoundError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime


def runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


RuntimeParam = Annotated[Runtime, Depends(runtime_of)]


def pool_of(
    runtime: RuntimeParam,
    pool: Annotated[str | None, Query(description="pool name; may be left out when there is one pool")] = None,
) -> ServedPool:
    """The named pool, or the only one.

    Raises:
        NotFoundError, InvalidRequestError: no such pool, or several and none is named.
    """
    pools = runtime.pools.pools
    if pool is None:
        if len(pools) > 1:
            raise InvalidRequestError(f"name a pool: {', '.join(pools)}", param="pool")
        return next(iter(pools.values()))
    if pool not in pools:
        raise NotFoundError(f"there is no pool {pool!r}; there are: {', '.join(pools)}", param="pool")
    return pools[pool]


PoolParam = Annotated[ServedPool, Depends(pool_of)]


def optional_pools(
    runtime: RuntimeParam,
    pool: Annotated[str | None, Query(description="pool name; all pools when left out")] = None,
) -> list[ServedPool]:
    """The named pool alone, or all of them."""
    return list(runtime.pools.pools.values()) if pool is None else [pool_of(runtime, pool)]


PoolsParam = Annotated[list[ServedPool], Depends(optional_pools)]
