"""Which of vLLM's parsers reads a model's tool calls and its reasoning, by the model's family. Pure: facts of the model in, names out.

A family is known by its `model_type` (config.json) or by what its chat template writes around tool calls and reasoning. The template decides where
both could, because fine-tunes keep the `model_type` of their base and bring a template of their own.
"""

from __future__ import annotations

from msgspec import Struct

AUTO, NONE = "auto", "none"


class Choice(Struct, frozen=True):
    """name: of vLLM's parser; "" for none. why: the end of a sentence for the log. is_set: the operator named it, so it must be usable.

    holds_calls: a grammar holds calls that the model makes by itself to the tools' names and schemas.
    """

    name: str
    why: str
    is_set: bool = False
    holds_calls: bool = False


class Family(Struct, frozen=True):
    """Models that one parser reads.

    model_types: as config.json has them; empty: any. marks: texts that all must stand in the chat template; empty: any template.
    holds_calls: see `Choice`. has_own_form: vLLM writes its prompts without a chat template, and takes no other parser for it.
    """

    parser: str
    model_types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    holds_calls: bool = False
    has_own_form: bool = False

    def has(self, model_type: str, template: str) -> bool:
        """Return whether a model of this type, with this chat template, is of the family."""
        return (not self.model_types or model_type in self.model_types) and all(
            mark in template for mark in self.marks
        )


_GRANITE = ("granite", "granite_swa", "granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa")
_LING = ("bailing_hybrid", "bailing_moe_v3_vl")
# The first that fits counts. Marks are what each family's own template writes. Source: vLLM 0.32's parsers, and the published templates.
TOOL_FAMILIES = (
    Family("deepseek_v32", ("deepseek_v32",)),
    Family("deepseek_v4", ("deepseek_v4",)),
    Family("deepseek_v41", ("deepseek_v41",)),
    Family("deepseek_v3", marks=("<｜tool▁calls▁begin｜>", "```json")),
    Family("deepseek_v31", marks=("<｜tool▁calls▁begin｜>",)),
    Family("openai", ("gpt_oss",), has_own_form=True),
    Family("gemma4", ("gemma4", "gemma4_text", "gemma4_unified")),
    Family("kimi_k3", ("kimi_k3",)),
    Family("kimi_k2", marks=("<|tool_calls_section_begin|>",)),
    # These three write arguments as GLM does, and what stands around them otherwise.
    Family("hy_v3", ("hy_v3",)),
    Family("ling3", _LING, ("<arg_key>",)),
    Family("poolside_v1", ("laguna",), ("<arg_key>",)),
    Family("glm47", marks=("<arg_key>",)),
    Family("k2_horizon", marks=("<ifm|tool_calls>",)),
    Family("plamo3", marks=("<|plamo:begin_tool_requests:plamo|>",)),
    Family("gigachat3", marks=("<|function_call|>",)),
    Family("gigachat3", marks=("'role': 'function call'", "<|role_sep|>")),
    Family("granite-20b-fc", ("gpt_bigcode",), ("<function_call>",)),
    Family("minicpm5", marks=("<function name=", "<param name=")),
    Family("minimax_m3", ("minimax_m3_vl",)),
    Family("minimax_m2", marks=("<minimax:tool_call>",)),
    Family("seed_oss", marks=("<seed:tool_call>",)),
    Family("longcat", marks=("<longcat_tool_call>",)),
    Family("step3p5", ("step3p5", "step3p7")),
    Family("step3", ("step3_text", "step3_vl")),
    Family("hy_v4", ("hy_v4",)),
    Family("hunyuan_a13b", ("hunyuan_v1_moe", "hunyuan_v1_dense"), ("<tool_calls>",)),
    Family("ernie45", ("ernie4_5", "ernie4_5_moe"), ("<tool_call>",)),
    Family("jamba", ("jamba",), ("<tool_calls>",)),
    Family("dots", ("dots1", "dots3_note"), ("tool",)),
    Family("apertus", ("apertus",), ("<|tools_prefix|>",)),
    Family("muse_glimmer", ("muse_glimmer", "muse_glimmer_text")),
    Family("inkling", ("inkling_model", "inkling_mm_model")),
    Family("mimo", ("mimo", "mimo_v2", "mimo_v2_flash"), ("<tool_call>", "<function=")),
    Family("granite", marks=("<|tool_call|>",)),
    Family("internlm", marks=("<|action_start|>",)),
    Family("lfm2", marks=("<|tool_call_start|>",)),
    Family("functiongemma", marks=("<start_function_call>",)),
    Family("phi4_mini_json", ("phi3", "phi4mm", "phi4_multimodal"), ("<|tool|>",)),
    Family("olmo3", ("olmo3",), ("<function_calls>",)),
    Family("mistral", marks=("[TOOL_CALLS]",)),
    Family("qwen3_coder", marks=("<function=", "<parameter=")),
    Family("granite4", ("granitemoehybrid",), ("<tool_call>",)),
    # The demo model's template: it is so small that it misspells the names of tools. Only it writes a call on one line.
    Family("hermes", marks=('<tool_call>{"name": "',), holds_calls=True),
    Family("hermes", marks=("<tool_call>",)),
    Family("llama4_pythonic", ("llama4", "llama4_text")),
    Family("llama3_json", marks=("<|python_tag|>",)),
    Family("llama3_json", marks=("ipython", '"parameters"')),
)
REASONING_FAMILIES = (
    Family("openai_gptoss", ("gpt_oss",)),
    Family("deepseek_v4", ("deepseek_v4",)),
    Family("deepseek_v41", ("deepseek_v41",)),
    Family("deepseek_v3", ("deepseek_v3", "deepseek_v32"), ("thinking", "</think>")),
    Family("gemma4", ("gemma4", "gemma4_text", "gemma4_unified"), ("enable_thinking",)),
    Family("kimi_k3", ("kimi_k3",)),
    Family("kimi_k2", ("kimi_k2", "kimi_k25"), ("<think>",)),
    Family("glm47", ("glm4_moe_lite", "glm_moe_dsa"), ("<think>",)),
    Family("glm45", ("glm4_moe",), ("<think>",)),
    Family("minimax_m3", ("minimax_m3_vl",)),
    Family("minimax_m2", ("minimax_m2",)),
    Family("seed_oss", marks=("<seed:think>",)),
    Family("step3p5", ("step3p5", "step3p7")),
    Family("step3", ("step3_text", "step3_vl")),
    Family("hy_v3", ("hy_v3",)),
    Family("hy_v4", ("hy_v4",)),
    Family("ling3", _LING, ("<think>", "<arg_key>")),
    Family("poolside_v1", ("laguna",), ("<think>", "<assistant>")),
    Family("minicpmv", ("minicpmv4_6", "minicpmv4_7"), ("<think>",)),
    Family("k2_horizon", marks=("<ifm|think>",)),
    Family("plamo3", marks=("<|plamo:begin_think:plamo|>",)),
    Family("hunyuan_a13b", ("hunyuan_v1_moe", "hunyuan_v1_dense"), ("<think>",)),
    Family("ernie45", ("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe"), ("<think>",)),
    Family("muse_glimmer", ("muse_glimmer", "muse_glimmer_text")),
    Family("inkling", ("inkling_model", "inkling_mm_model")),
    Family("mimo", ("mimo", "mimo_v2", "mimo_v2_flash"), ("<think>",)),
    Family("nemotron_v3", ("nemotron_h", "nemotron_h_puzzle"), ("<think>",)),
    Family("olmo3", ("olmo3",), ("<think>",)),
    Family("granite", _GRANITE, ("Here is my thought process",)),
    # Not 3.3, whose template has `thinking` and whose tokenizer no `<think>`: this parser would take its answers for thoughts.
    Family("granite_thinking_parser", _GRANITE, ("<think>", "enable_thinking")),
    Family("mistral", marks=("[THINK]",)),
    # These think unless the request says `enable_thinking: false`; the template then closes an empty block.
    Family("qwen3", marks=("<think>", "enable_thinking")),
    Family("deepseek_r1", marks=("<think>",)),
)


def choose_tool_parser(setting: str, model_type: str, template: str) -> Choice:
    """Choose a parser of tool calls. setting: "auto", "none" or a parser's name. template: the chat template, "" for none."""
    return _choose(setting, TOOL_FAMILIES, model_type, template, needed="tool")


def choose_reasoning_parser(setting: str, model_type: str, template: str) -> Choice:
    """Choose a reasoning parser. Arguments as for `choose_tool_parser`."""
    return _choose(setting, REASONING_FAMILIES, model_type, template, needed="")


def _choose(
    setting: str, families: tuple[Family, ...], model_type: str, template: str, *, needed: str
) -> Choice:
    if setting in (NONE, ""):
        return Choice("", "it is switched off")
    if setting != AUTO:
        return Choice(setting, "it was set", is_set=True)
    for family in families:
        if family.has(model_type, template) and (needed in template.lower() or family.has_own_form):
            said = f"its chat template has {family.marks[0]!r}" if family.marks else f"it is a {model_type}"
            return Choice(family.parser, said, holds_calls=family.holds_calls)
    return Choice("", "its chat template has no form of one")
