"""Known providers of models: no call of a rollout leaves for one of them by accident, where it would be paid for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache
from typing import Any

from groundwire.adapters.agents.changes import wrap

_HOSTS = """
    api.openai.com *.api.openai.com chatgpt.com *.openai.azure.com *.cognitiveservices.azure.com
    *.services.ai.azure.com *.inference.ai.azure.com *.models.ai.azure.com
    models.inference.ai.azure.com models.github.ai api.githubcopilot.com *.githubcopilot.com
    api.anthropic.com generativelanguage.googleapis.com aiplatform.googleapis.com *-aiplatform.googleapis.com
    bedrock*-runtime*.amazonaws.com bedrock*-runtime*.amazonaws.com.cn bedrock*-runtime*.api.aws
    bedrock-mantle.*.api.aws runtime.sagemaker.*.amazonaws.com *.ml.cloud.ibm.com
    inference.generativeai.*.oraclecloud.com
    api.groq.com api.mistral.ai codestral.mistral.ai api.cohere.com api.cohere.ai api.together.xyz api.together.ai
    openrouter.ai api.deepseek.com api.x.ai *.api.x.ai api.fireworks.ai api.perplexity.ai api.cerebras.ai
    router.huggingface.co api-inference.huggingface.co *.endpoints.huggingface.cloud
    integrate.api.nvidia.com ai.api.nvidia.com dashscope*.aliyuncs.com *.maas.aliyuncs.com
    api.moonshot.ai api.moonshot.cn open.bigmodel.cn api.z.ai api.minimax.io api.minimaxi.com api.minimax.chat
    ark.*.volces.com ark.*.bytepluses.com qianfan.baidubce.com aip.baidubce.com api.hunyuan.cloud.tencent.com
    hunyuan.tencentcloudapi.com spark-api*.xf-yun.com api.siliconflow.cn api.siliconflow.com api.stepfun.com
    api.ai21.com api.replicate.com api.deepinfra.com api.novita.ai api.studio.nebius.* api.tokenfactory.nebius.com
    api.hyperbolic.xyz api.sambanova.ai api.upstage.ai api.reka.ai api.voyageai.com api.writer.com api.inference.net
    api.featherless.ai api.lambda.ai api.lambdalabs.com inference.baseten.co api.friendli.ai api.llama.com
    api.inceptionlabs.ai api.scaleway.ai api.venice.ai llm.chutes.ai api.aimlapi.com api.aleph-alpha.com
    ollama.com api.portkey.ai gateway.ai.cloudflare.com ai-gateway.vercel.sh
"""
_PROVIDER = re.compile("|".join(translate(host) for host in _HOSTS.split()))
_WAYS = (
    *(("socket", name) for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex")),
    *(("socket", f"socket.{name}") for name in ("connect", "connect_ex")),
    ("http.client", "HTTPConnection.putrequest"),  # behind an HTTP proxy, and on a connection that is open
    *(("uvloop", f"Loop.{name}") for name in ("create_connection", "getaddrinfo")),
    ("aiohttp.resolver", "AsyncResolver.resolve"),
    *((module, "secure_channel") for module in ("grpc", "grpc.aio")),
)
"""What each transport passes; asyncio, anyio, trio and the clients that use threads pass the first."""


class ProviderRefusedError(RuntimeError):
    """A call of a rollout to a provider of models that nothing has allowed."""


@lru_cache(maxsize=1024)
def is_provider(host: str) -> bool:
    """Whether a host, which may have a port, serves models to anybody who pays."""
    return _PROVIDER.match(host.lower().partition(":")[0].rstrip(".")) is not None


def guard(check: Callable[[str], None]) -> None:
    """Call ``check`` with each host that a transport of this process looks up or connects to."""

    def checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        for host in _hosts(instance, args, kwargs):
            check(host)
        return wrapped(*args, **kwargs)

    for module, path in _WAYS:
        wrap(module, path, checked)


def _hosts(instance: Any, args: Any, kwargs: Any) -> Iterator[str]:
    """The texts among the arguments of a call of :data:`_WAYS`, one of which is the host."""
    values = (*args, *kwargs.values(), getattr(instance, "host", None), getattr(instance, "_tunnel_host", None))
    for value in values:
        address = value[0] if isinstance(value, tuple) and value else value
        if isinstance(address, bytes | bytearray):
            yield address.decode("utf-8", "replace")
        elif isinstance(address, str):
            yield address
