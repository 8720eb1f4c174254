"""Settings of an endpoint picker, beside those of the replica that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dualmap.runtime.certificates import ServerFiles, server_files


class PickerSettings(BaseModel):
    """Where a picker listens. What it accepts, and how long it waits, is in ``router``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9002, ge=0, le=65535, description="port of the gRPC service that Envoy asks; 0 picks a free one")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="extra port of the gRPC health service, which the other port has too"
    )
    ops_port: int = Field(
        9090, ge=0, le=65535, description="HTTP port of this picker: health, metrics, administration; no inference"
    )
    tls_certificate: Path | None = Field(
        None, description="file with the certificate of the gRPC port, PEM, read again when it changes (none: no TLS)"
    )
    tls_key: Path | None = Field(None, description="file with the key of that certificate, PEM, without a password")
    tls_client_ca: Path | None = Field(
        None, description="file with the CAs whose clients may connect, PEM (none: any client)"
    )
    first_token_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="HTTP port at which a filter of the gateway reports the first tokens of streams; 0 picks a free"
        " one. The gateway is told it",
    )
    choices: int = Field(
        2,
        ge=1,
        le=2,
        description="addresses that the gateway is given: 2 with a second choice, for its retry; 1 for an ORIGINAL_DST"
        " cluster, which takes no list",
    )
    observed_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="share of the streams whose body is asked for, where the gateway neither sends bodies nor reports"
        " first tokens: prefill rates are learned from those that are seen. Each chunk of theirs costs the picker CPU",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        _ = self.tls
        return self

    @property
    def tls(self) -> ServerFiles | None:
        """The files of the gRPC port; None without TLS."""
        ca = self.tls_client_ca
        certificate, key, requires = self.tls_certificate, self.tls_key, ca is not None
        return server_files("picker", certificate, key, ca, requires_client=requires, protocol="h2")
