"""The part of OpenAI's API that serve.py implements: fields, their types and ranges, and the replies.

A field that is not here is refused, and so is a value that would have to change the answer and does not. null
is the default, as in OpenAI's API.
"""

import dataclasses
import json
import math
import os
import time
import uuid

MOST_TOKENS = 4096  # of one answer
# Values that ask for nothing, of fields that are not supported otherwise.
NEUTRAL = {"n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (),
           "stop": ([],), "suffix": ("",), "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0),
           "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"),
           "response_format": ({"type": "text"},)}
COMMON = ("model", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "user", "n",
          "logprobs", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
FIELDS = {"completions": (*COMMON, "prompt", "best_of", "echo", "suffix"),
          "chat": (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
                   "response_format")}
ROLES = ("system", "user", "assistant")


class Refused(Exception):
    """A request that is not done. `param`: the field; `status`: of HTTP."""

    def __init__(self, param, found, allowed, status=400, code=None):
        super().__init__(f"{param}: {found}; allowed: {allowed}")
        self.param, self.status, self.code = param, status, code

    def body(self):
        return error_body(str(self), "invalid_request_error", self.param, self.code)


def error_body(message, kind, param=None, code=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass
class Asked:
    """A request that has been checked."""

    chat: bool
    tokens: list  # all that the model reads, the system prompt included
    max_tokens: int
    temperature: float
    top_p: float
    seed: "int | None"
    stream: bool
    include_usage: bool


class Reader:
    """Reads requests. tokenizer: of transformers. vocabulary: tokens are below it. positions: of the model;
    None: any number. system_prompt: text in front of each prompt, and the system message of chats that have
    none."""

    def __init__(self, tokenizer, name, vocabulary, positions=None, system_prompt=""):
        self.tokenizer, self.name, self.system_prompt = tokenizer, name, system_prompt
        self.vocabulary, self.positions = vocabulary, positions or math.inf
        self.system_tokens = self.encode(system_prompt, True) if system_prompt else []

    def encode(self, text, special):
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def prefixes(self):
        """Tokens that many requests begin with."""
        found = [self.system_tokens]
        if self.system_prompt and getattr(self.tokenizer, "chat_template", None):
            first, second = (self.chat_tokens([{"role": "user", "content": text}]) for text in ("1", "2"))
            found.append(os.path.commonprefix([first, second]))
        return found

    def read(self, body, chat):
        """The Asked of a JSON value. Raises Refused."""
        if not isinstance(body, dict):
            raise Refused("the body", f"a {type(body).__name__}", "a JSON object")
        fields = FIELDS["chat" if chat else "completions"]
        for name, value in body.items():
            if name not in fields:
                raise Refused(name, "unknown", ", ".join(sorted(fields)))
            if name in NEUTRAL and value is not None and not any(
                    type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
                raise Refused(name, json.dumps(value), " or ".join(["null", *map(json.dumps, NEUTRAL[name])]))
        model = self.field(body, "model", self.name, str, self.name, lambda _: True)
        if model != self.name:
            raise Refused("model", json.dumps(model), self.name, 404, "model_not_found")
        self.field(body, "user", "", str, "text", lambda _: True)
        tokens = self.messages(body) if chat else self.prompt(body)
        stream = self.field(body, "stream", False, bool, "true, false", lambda _: True)
        return Asked(
            chat, tokens, self.max_tokens(body, len(tokens), chat),
            self.field(body, "temperature", 0, (int, float), "0 to 2", lambda t: 0 <= t <= 2),
            self.field(body, "top_p", 1, (int, float), "above 0, to 1", lambda p: 0 < p <= 1),
            self.field(body, "seed", None, int, "0 to 2**63 - 1", lambda s: 0 <= s < 2**63),
            stream, self.include_usage(body, stream))

    @staticmethod
    def field(body, name, default, kinds, allowed, good):
        value = body.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds is bool) or not good(value):
            raise Refused(name, json.dumps(value)[:200], allowed)
        return value

    def max_tokens(self, body, used, chat):
        names = ("max_tokens", "max_completion_tokens") if chat else ("max_tokens",)
        allowed = f"1 to {MOST_TOKENS}"
        given = [(name, self.field(body, name, None, int, allowed, lambda n: 1 <= n <= MOST_TOKENS))
                 for name in names if body.get(name) is not None]
        room = self.positions - used
        if room < 1:
            raise Refused("messages" if chat else "prompt", f"has {used} tokens",
                          f"at most {self.positions - 1}: the model has {self.positions} positions")
        if len(given) > 1:
            raise Refused("max_completion_tokens", "given with max_tokens", "one of the two")
        for name, tokens in given:
            if tokens > room:
                raise Refused(name, f"{tokens} after a prompt of {used} tokens",
                              f"1 to {room}: the model has {self.positions} positions")
            return tokens
        return min(room, MOST_TOKENS if chat else 16)

    def include_usage(self, body, stream):
        options = self.field(body, "stream_options", {}, dict, "an object, with stream",
                             lambda found: stream and not set(found) - {"include_usage"})
        return self.field(options, "include_usage", False, bool, "true, false", lambda _: True)

    def prompt(self, body):
        allowed = f"text, or a list of tokens below {self.vocabulary}; one prompt"
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            # The tokenizer adds BOS where its model has one, once.
            tokens = self.text("prompt", prompt, not self.system_tokens)
            if tokens:
                return self.system_tokens + tokens
        elif isinstance(prompt, list) and prompt and all(
                type(token) is int and 0 <= token < self.vocabulary for token in prompt):
            return self.system_tokens + prompt
        raise Refused("prompt", json.dumps(body.get("prompt"))[:200], allowed)

    def text(self, name, text, special):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused(name, "has half of a surrogate pair", "Unicode text") from None
        return self.encode(text, special)

    def messages(self, body):
        allowed = f"a list of objects with a role ({', '.join(ROLES)}) and a content of text"
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("messages", json.dumps(messages)[:200], allowed)
        read = []
        for i, message in enumerate(messages):
            fits = isinstance(message, dict) and set(message) == {"role", "content"}
            content = self.content(message["content"]) if fits else None
            if content is None or message["role"] not in ROLES:
                raise Refused(f"messages[{i}]", json.dumps(message)[:200], allowed)
            read.append({"role": message["role"], "content": content})
        return self.chat_tokens(read)

    @staticmethod
    def content(content):
        """Text, also of parts; None: it is something else."""
        if isinstance(content, list) and content and all(
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                and len(part) == 2 for part in content):
            return "".join(part["text"] for part in content)
        return content if isinstance(content, str) else None

    def chat_tokens(self, messages):
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused("messages", "this model's tokenizer has no chat template", "/v1/completions")
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # of Jinja, or what the template raises
            raise Refused("messages", f"the model's chat template says: {error}", "what it takes") from None
        return self.text("messages", text, False)  # the template has the special tokens


class Answer:
    """Makes the replies to one request."""

    def __init__(self, asked, name):
        self.asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self.base = {"id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind,
                     "created": int(time.time()), "model": name}

        self.began = False

    def usage(self, generated):
        read = len(self.asked.tokens)
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    @staticmethod
    def choice(said, finish):
        return {"index": 0, **said, "finish_reason": finish, "logprobs": None}

    def whole(self, text, finish, generated):
        said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        return {**self.base, "choices": [self.choice(said, finish)], "usage": self.usage(generated)}

    def chunk(self, text, finish=None):
        """A chunk of a stream: the text since the last one."""
        role = {} if self.began else {"role": "assistant"}
        self.began = True
        said = {"delta": {**role, "content": text}} if self.asked.chat else {"text": text}
        return self.chunk_of([self.choice(said, finish)], None)

    def usage_chunk(self, generated):
        return self.chunk_of([], self.usage(generated))

    def chunk_of(self, choices, usage):
        made = {**self.base, "choices": choices}
        if self.asked.chat:
            made["object"] = "chat.completion.chunk"
        if self.asked.include_usage:
            made["usage"] = usage
        return made


def model_card(name, created):
    return {"id": name, "object": "model", "created": created, "owned_by": "flashcore"}
