"""Settings of discovery: where a pool's instances are found, beside those that are configured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"

Port = Annotated[int, Field(ge=1, le=65_535)]


class KubernetesSettings(BaseModel):
    """The rule that says which pods of a namespace are the pool's instances: exactly one of label_selector,
    inference_pool and service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label_selector: str | None = Field(
        None, min_length=1, description="label selector of the pods, as kubectl's -l: app=vllm,tier in (a, b)"
    )
    inference_pool: str | None = Field(
        None,
        pattern=_NAME,
        description="name of an InferencePool (inference.networking.k8s.io/v1), whose selector and target ports count",
    )
    service: str | None = Field(
        None, pattern=_NAME, description="name of a Service, whose EndpointSlices name the pods and their port"
    )
    namespace: str | None = Field(None, pattern=_NAME, description="namespace of the pods (none: the worker's own)")
    port: Port | None = Field(
        None,
        description="port of the engine, unless a pod's label or annotation names another (none: what the InferencePool"
        " or the Service says, else 8000)",
    )
    role_label: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9./_-]{0,315}[A-Za-z0-9])?$",
        description="a further label of pods that names their role, as DYN_EPP_ROLE_LABEL does for Dynamo",
    )
    revision_label: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9./_-]{0,315}[A-Za-z0-9])?$",
        description="a further label of pods that names their revision, as pod-template-hash or"
        " controller-revision-hash",
    )
    scheme: Literal["http", "https"] = Field("http", description="how instances are called")
    api_url: str | None = Field(
        None, pattern=r"^https?://", description="URL of the API server (none: that of the cluster the worker runs in)"
    )
    token_file: Path | None = Field(
        None,
        description="file of the bearer token, read for every call (none: the pod's service account, if it has one)",
    )
    ca_file: Path | None = Field(
        None, description="file (PEM) of the CA of the API server (none: the service account's, else the system's)"
    )

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        given = [name for name in ("label_selector", "inference_pool", "service") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of label_selector, inference_pool and service,"
                f" not {' and '.join(given) if given else 'none'}"
            )
        return self


class DiscoverySettings(BaseModel):
    """Where a pool's instances are found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubernetes: KubernetesSettings = Field(description="pods of a Kubernetes cluster")
