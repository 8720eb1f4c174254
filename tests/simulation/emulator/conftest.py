"""Clients for the emulated server, which need no certificates and would load them all for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

from dualmap.simulation.emulator.instance import EmulatedInstance


@pytest.fixture
async def http(emulator: EmulatedInstance) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
async def openai_client(emulator: EmulatedInstance) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"{emulator.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


@pytest.fixture
async def anthropic_client(emulator: EmulatedInstance) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(
        base_url=emulator.url, api_key="none", max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client
