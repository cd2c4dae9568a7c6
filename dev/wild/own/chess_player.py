"""The player of AutoGen's chess sample, made with the client that its configuration file names."""

from autogen_core.models import ChatCompletionClient
from main import create_ai_player

_CLIENT = {"provider": "autogen_ext.models.openai.OpenAIChatCompletionClient", "config": {"model": "gpt-4o"}}
player = create_ai_player(ChatCompletionClient.load_component(_CLIENT))
