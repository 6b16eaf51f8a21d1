"""Which clients there are, what each is installed from and which of our own tests run with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.live.shared.report import ROOT

REQUIREMENTS = ROOT / "requirements" / "clients"
SCRIPTS = Path(__file__).with_name("scripts")
HOOK_TESTS = "tests/unit/overture_client/test_hooks.py"


@dataclass(frozen=True, slots=True)
class Client:
    """One client and the calls that are made with it.

    package: whose version the table shows. environment: a list in requirements/clients, which several clients may share. hook: the name of
    our hook for this framework; its example and its tests run here. no_deps: the package's own list of requirements cannot be installed, so
    requirements/clients names all that is needed. empty_modules: what the package imports though these calls never use it.
    shared_script: whose script makes the calls, where several clients have one; it is given `arguments` after the server's address and the
    model. has_long_prompts: the calls are made to the server with the long context.
    """

    name: str
    package: str
    environment: str
    hook: str = ""
    no_deps: bool = False
    empty_modules: tuple[str, ...] = ()
    remarks: str = ""
    shared_script: str = ""
    arguments: tuple[str, ...] = ()
    has_long_prompts: bool = False

    @property
    def script(self) -> Path:
        """What makes the calls: in Python, or in JavaScript where the client is a library for Node."""
        name = f"{(self.shared_script or self.name).replace('-', '_')}_calls"
        return _one_of(SCRIPTS / f"{name}.py", SCRIPTS / f"{name}.mjs")

    @property
    def requirements(self) -> Path:
        """The exact versions that the environment is made from: a list for pip, or a package.json for npm."""
        return _one_of(REQUIREMENTS / f"{self.environment}.txt", REQUIREMENTS / f"{self.environment}.json")


def _one_of(path: Path, other: Path) -> Path:
    return other if other.is_file() else path


# What MetaGPT imports when it is imported itself: other providers' SDKs and tools of roles that are not tried here.
METAGPT_UNUSED = tuple(
    """
    PIL anthropic.types boto3 botocore.eventstream chardet dashscope.aigc.generation dashscope.api_entities.aiohttp_request
    dashscope.api_entities.api_request_data dashscope.api_entities.api_request_factory dashscope.api_entities.dashscope_response
    dashscope.client.base_api dashscope.common.constants dashscope.common.error docx google.ai google.generativeai.generative_models
    google.generativeai.types.generation_types imap_tools joblib playwright.async_api qianfan.resources.typing sklearn.feature_selection
    sklearn.impute sklearn.model_selection sklearn.preprocessing sparkai.core.messages.ai sparkai.core.messages.base sparkai.core.messages.human
    sparkai.core.messages.system sparkai.core.outputs.llm_result sparkai.llm.llm tree_sitter_python volcenginesdkarkruntime._base_client
    volcenginesdkarkruntime._streaming volcenginesdkarkruntime.types.chat zhipuai.core._http_client zhipuai.types.chat.chat_completion
    """.split()
)

COMMAND = "the command, as a process"

CLIENTS = (
    Client("openai", "openai", "openai"),
    Client("anthropic", "anthropic", "anthropic"),
    Client("langchain", "langchain-openai", "langgraph"),
    Client("langgraph", "langgraph", "langgraph", hook="langgraph"),
    Client("llama-index", "llama-index-llms-openai-like", "llama-index"),
    Client("litellm", "litellm", "litellm"),
    Client(
        "litellm-proxy", "litellm", "litellm", remarks="`litellm --config`, between the client and Overture"
    ),
    Client("crewai", "crewai", "crewai", hook="crewai"),
    Client("autogen", "autogen-ext", "autogen"),
    Client("openai-agents", "openai-agents", "openai-agents", hook="openai_agents"),
    Client("pydantic-ai", "pydantic-ai-slim", "pydantic-ai"),
    Client("instructor", "instructor", "instructor"),
    Client("llm", "llm", "llm", remarks=COMMAND),
    Client(
        "metagpt",
        "metagpt",
        "metagpt",
        hook="metagpt",
        no_deps=True,
        empty_modules=METAGPT_UNUSED,
        remarks="its own list of requirements cannot be installed; providers that are not used are empty modules",
    ),
    Client(
        "openwebui",
        "open-webui",
        "openwebui",
        no_deps=True,
        remarks="its backend, without accounts; what its page asks for",
    ),
    Client(
        "ai-sdk",
        "ai",
        "ai-sdk",
        remarks="with `@ai-sdk/openai`, `@ai-sdk/openai-compatible` and `@ai-sdk/anthropic`",
    ),
    Client(
        "openai-node",
        "openai",
        "openai-node",
        remarks="the SDKs for JavaScript: their helpers, with those of `@anthropic-ai/sdk`",
    ),
    Client("agno", "agno", "agno"),
    Client(
        "strands",
        "strands-agents",
        "strands",
        remarks="by chat completions, responses and messages",
    ),
    Client("lm-eval", "lm_eval", "lm-eval", remarks=COMMAND),
    Client(
        "promptfoo",
        "promptfoo",
        "promptfoo",
        remarks=f"{COMMAND}, by chat completions, responses, messages and completions",
    ),
    Client("aider", "aider-chat", "aider", remarks=COMMAND),
    Client("codex", "@openai/codex", "codex", has_long_prompts=True, remarks=f"{COMMAND}, by responses"),
    Client(
        "claude-code",
        "@anthropic-ai/claude-code",
        "claude-code",
        has_long_prompts=True,
        remarks=f"{COMMAND}, by messages",
    ),
    *(
        Client(
            f"opencode-{api}",
            "opencode-ai",
            "opencode",
            shared_script="opencode",
            arguments=(api,),
            has_long_prompts=True,
            remarks=f"{COMMAND}, by {words}",
        )
        for api, words in (("chat", "chat completions"), ("responses", "responses"))
    ),
    Client(
        "qwen-code-4k",
        "@qwen-code/qwen-code",
        "qwen-code",
        shared_script="qwen-code",
        remarks=f"{COMMAND}; its prompt is longer than the context, and it says so",
    ),
    Client(
        "qwen-code-32k",
        "@qwen-code/qwen-code",
        "qwen-code",
        shared_script="qwen-code",
        has_long_prompts=True,
        remarks=f"{COMMAND}, with room for its prompt",
    ),
)
