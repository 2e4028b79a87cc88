"""Requests made by schemathesis from the gateway's own OpenAPI document: some that fit it, some that nearly do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

SECONDS = 10
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
"""What an answer is held against the document by, beside our own looks at it."""
_MOMENTS = ("wait_seconds",)
"""Fields that ask the gateway to wait: none of these requests may."""


class SchemaFuzz:
    """Sends `examples` requests of each kind to every operation. Sums are of all operations."""

    def __init__(self, url: str, key: str, chosen_seed: int) -> None:
        self._url, self._key, self._seed = url, key, chosen_seed
        self._session = requests.Session()
        self._session.trust_env = False
        self.requests = 0
        self.server_errors = 0
        self.hangs = 0
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()

    def run(self, examples: int) -> None:
        document = self._session.get(
            f"{self._url}/openapi.json", headers={"Authorization": f"Bearer {self._key}"}, timeout=SECONDS
        ).json()
        schema = schemathesis.openapi.from_dict(document)
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    strategy = operation.as_strategy(generation_mode=mode)
                    self._send_all(strategy, examples)
                except Exception as e:
                    # An operation without parameters or body can't be asked wrongly.
                    if type(e).__name__ not in ("SkipTest", "Unsatisfiable"):
                        raise

    def _send_all(self, strategy: Any, examples: int) -> None:
        @seed(self._seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def send(case: Any) -> None:
            self._send(case)

        send()

    def _send(self, case: Any) -> None:
        for part in (case.body, case.query):
            if isinstance(part, dict):
                for name in _MOMENTS:
                    part.pop(name, None)
        self.requests += 1
        what = f"schemathesis: {case.method} {case.path}"
        try:
            response = case.call(
                base_url=self._url,
                session=self._session,
                headers={"Authorization": f"Bearer {self._key}"},
                timeout=SECONDS,
            )
        except requests.Timeout:
            self.hangs += 1
            self.wrong.append(f"{what}: no answer within {SECONDS} s; {case.as_curl_command()}")
            return
        except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, UnicodeError):
            self.requests -= 1  # Never sent.
            return
        self.statuses[response.status_code] += 1
        for problem in self._problems(case, response):
            self.wrong.append(f"{what}: {problem}; {case.as_curl_command()}")

    def _problems(self, case: Any, response: Any) -> Iterator[str]:
        if response.status_code >= 500:
            self.server_errors += 1
            yield f"status {response.status_code}: {response.content[:200]!r}"
            return
        if b"Traceback" in response.content or b"site-packages" in response.content:
            yield "the answer shows a traceback"
        try:
            case.validate_response(response, checks=CONFORMANCE)
        except (FailureGroup, Failure) as e:
            yield " ".join(str(e).split())[:600]
