"""Who asks stays with one server, as long as it is there (a callback of LiteLLM's proxy).

By `prompt_cache_key`, or `user`: of the servers that LiteLLM takes for healthy the one whose hash
with it is highest ("rendezvous hashing"), so that a server which goes moves nobody but its own.
"""

import hashlib
from typing import Any

from litellm.integrations.custom_logger import CustomLogger


class Sticky(CustomLogger):  # type: ignore[misc]
    """The callback."""

    async def async_filter_deployments(  # type: ignore[override]
        self,
        healthy_deployments: list[Any],
        request_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> list[Any]:
        """Which of the servers may answer."""
        asked = request_kwargs or {}
        key = asked.get("prompt_cache_key") or asked.get("user")
        if not key or not healthy_deployments:
            return healthy_deployments

        def rank(deployment: dict[str, Any]) -> bytes:
            data = f"{key}\n{deployment['litellm_params']['api_base']}".encode()
            return hashlib.sha256(data).digest()

        return [max(healthy_deployments, key=rank)]


sticky = Sticky()
