"""Settings of the state store."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from dualmap.statestore.url import parse_store_url


def _store_url(url: str) -> str:
    try:
        parse_store_url(url)
    except ValueError as error:
        raise PydanticCustomError("store_url", "{reason}", {"reason": str(error)}) from error
    return url


class StoreSettings(BaseModel):
    """Location of the shared state."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_store_url)] = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss://, redis+sentinel://, redis+cluster://, unix:// or embedded:///PATH;"
        " embedded:// and memory:// are for one process alone, for tests",
    )
    prefix: str = Field("dualmap", pattern=r"^[A-Za-z0-9_.-]+$", description="first part of every key")
    connect_timeout_s: float = Field(2.0, gt=0, description="time to connect to the store, seconds")
    command_timeout_s: float = Field(3.0, gt=0, description="time for one store call, seconds")
