"""A gateway with a scripted engine, in the test's own event loop, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from leyden.client import LeydenClient
from leyden.gateway.app import running_gateway
from leyden.gateway.options import GatewayOptions
from leyden.gateway.service import Gateway
from leyden.gateway.store.address import StoreAddress
from leyden.schema import AgentSpec, Claim, ClaimRequest, EngineModel, GraderSpec, RolloutConfig, RolloutCreate
from tests.gateway.scripted_engine import ScriptedEngine
from tests.postgres import postgres_server
from tests.tiny import make_tiny_model

ADMIN = "admin-key-of-the-tests"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder, local_files_only=True)


@dataclass
class World:
    """Everything that a test of the gateway talks to."""

    gateway: Gateway
    url: str
    admin: LeydenClient
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    options: GatewayOptions

    async def claim(self, *, grader: bool = False, controller: str = "c1", lease: float = 30, **create: Any) -> Claim:
        """A new rollout, claimed."""
        spec = GraderSpec(command=["true"]) if grader else None
        config = create.pop("config", None) or RolloutConfig(agent=AgentSpec(command=["true"]), grader=spec)
        await self.admin.create_rollouts([RolloutCreate(input={"q": 1}, config=config, **create)])
        claims = await self.admin.claim(ClaimRequest(controller_id=controller, lease_seconds=lease, wait_seconds=5))
        assert len(claims) == 1
        return claims[0]

    def agent(self, key: str, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/openai/v1", api_key=key, max_retries=0, **more)

    async def chat(self, key: str, body: dict[str, Any], path: str = "/openai/v1/chat/completions") -> Any:
        """One raw call: (status, parsed body)."""
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)


@asynccontextmanager
async def make_world(
    store: StoreAddress, model: Path, tokenizer: Any, engine: bool = True, **options: Any
) -> AsyncIterator[World]:
    settings: dict[str, Any] = {
        "store": store,
        "model_folder": model,
        "model_name": "tiny",
        "admin_key": ADMIN,
        "keepalive_seconds": 5,
        "request_timeout_seconds": 10,
        "replay_grace_seconds": 0.5,
        **options,
    }
    opts = GatewayOptions(**settings)
    async with AsyncExitStack() as stack:
        scripted = ScriptedEngine(tokenizer)
        await scripted.start()
        stack.push_async_callback(scripted.stop)
        gateway, url = await stack.enter_async_context(running_gateway(opts))
        admin = await stack.enter_async_context(LeydenClient(url, ADMIN, patience=2))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        if engine:
            await admin.register_models(
                [EngineModel(model="tiny", endpoint=scripted.endpoint, version=7, kind="leyden")]
            )
        yield World(gateway, url, admin, scripted, http, opts)


async def everything_stored(world: World) -> bytes:
    """All that the store holds, as bytes in which a secret could be found."""
    if isinstance(world.options.store, Path):
        return b"".join(p.read_bytes() for p in world.options.store.parent.glob("store.db*"))

    def dump(db: Any) -> bytes:
        tables = [r[0] for r in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        assert "calls" in tables
        rows = [r[0] for t in tables for r in db.execute(f"SELECT t::text FROM {t} t").fetchall()]
        return "\n".join(rows).encode()

    return await world.gateway.store.db.read(dump)


MakeWorld = Callable[..., Any]


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes empty databases on a PostgreSQL server of this test process."""
    with postgres_server(durable=False) as make:
        yield make


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """Where the test's gateways keep what they record: every test runs on both kinds."""
    return tmp_path / "store.db" if request.param == "sqlite" else request.getfixturevalue("new_database")()


on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
"""For tests of what only one of the stores has."""


@pytest.fixture
def world_maker(store: StoreAddress, model_folder: Path, tokenizer: Any) -> MakeWorld:
    """Opens gateways with options of the test's, on the same store each time."""

    def make(**options: Any) -> Any:
        return make_world(options.pop("store", store), model_folder, tokenizer, **options)

    return make


@pytest_asyncio.fixture
async def world(world_maker: MakeWorld) -> AsyncIterator[World]:
    async with world_maker() as w:
        yield w
