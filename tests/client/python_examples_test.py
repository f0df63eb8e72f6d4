"""openai_api.py of the Python package's examples: what it takes of requests, and its replies. tests/torch has
the rest of serve.py."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"))
from openai_api import Answer, Asked, Reader, Refused  # noqa: E402

BOS, SYSTEM, USER, ASSISTANT = 1, 2, 3, 4


class Numbers:
    """A tokenizer whose text is the numbers of the tokens, with BOS first."""

    chat_template = "of each message its role, then its content"

    def encode(self, text, add_special_tokens=True):
        return [BOS] * add_special_tokens + [int(number) for number in text.split()]

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        roles = [message["role"] for message in messages]
        if roles.count("system") > 1:
            raise RuntimeError("one system message")
        marks = dict(system=SYSTEM, user=USER, assistant=ASSISTANT)
        said = " ".join(f"{marks[message['role']]} {message['content']}" for message in messages)
        return f"{BOS} {said} {ASSISTANT}"


def reader(**options):
    return Reader(Numbers(), "tiny", 100, **{"positions": 32, **options})


def user(content):
    return [{"role": "user", "content": content}]


class ReadTest(unittest.TestCase):
    def refused(self, body, chat=False, **options):
        with self.assertRaises(Refused) as caught:
            reader(**options).read(body, chat)
        return caught.exception

    def test_defaults(self):
        asked = reader().read({"prompt": "5 6"}, False)
        self.assertEqual(asked, Asked(chat=False, tokens=[BOS, 5, 6], max_tokens=16, temperature=0, top_p=1,
                                      seed=None, stream=False, include_usage=False))
        nothing = dict.fromkeys(("max_tokens", "temperature", "stream", "stop", "logit_bias", "model"))
        self.assertEqual(reader().read({"prompt": "5 6", **nothing}, False), asked)

    def test_prompts(self):
        for prompt, tokens in (("5 6", [BOS, 5, 6]), ([5, 6], [5, 6]), (["5 6"], [BOS, 5, 6]),
                               ([[5, 6]], [5, 6])):
            self.assertEqual(reader().read({"prompt": prompt}, False).tokens, tokens)
            with_system = reader(system_prompt="9 8").read({"prompt": prompt}, False).tokens
            self.assertEqual(with_system, [BOS, 9, 8, 5, 6])

    def test_bad_prompts(self):
        for prompt in (None, "", [], [100], [-1], [True], [1.0], ["5", "6"], [[5], [6]], [["5"]], 5, {}):
            error = self.refused({"prompt": prompt})
            self.assertEqual(str(error), f"prompt: {json.dumps(prompt)}; allowed: text, or a list of tokens "
                             "below 100; one prompt")
            self.assertEqual(error.body()["error"]["param"], "prompt")
        self.assertIn("half of a surrogate pair", str(self.refused({"prompt": "\ud800"})))

    def test_fields_of_a_wrong_type_or_value(self):
        for name, allowed, *values in (
                ("max_tokens", "1 to 4096", 0, -1, 4097, 1.0, True, "5", 10**400),
                ("temperature", "0 to 2", -1e-9, 2.1, True, "0", float("nan"), float("inf"), [], 10**400),
                ("top_p", "above 0, to 1", 0, 1.1, -1, True, "1", float("nan")),
                ("seed", "0 to 2**63 - 1", -1, 2**63, 1.0, True, "1"),
                ("stream", "true, false", 1, 0, "true", []),
                ("user", "text", 1, []),
                ("stream_options", "an object, with stream", {}, [], 1, {"include_usage": True})):
            for value in values:
                with self.subTest(name, value=value):
                    error = self.refused({"prompt": "5", name: value})
                    self.assertTrue(str(error).endswith(f"; allowed: {allowed}"), error)
                    self.assertTrue(str(error).startswith(f"{name}: "), error)
                    self.assertEqual((error.param, error.status), (name, 400))
        for value in (1, "a", {"banana": True}):
            body = {"prompt": "5", "stream": True, "stream_options": {"include_usage": value}}
            self.assertEqual(self.refused(body).param, "include_usage")

    def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(self):
        for name, neutral, others in (
                ("n", 1, (2, 0, "1", True)), ("best_of", 1, (2,)), ("echo", False, (True, 0)),
                ("suffix", "", ("a",)), ("logprobs", False, (0, 1, True)), ("stop", [], ("a", ["a"])),
                ("presence_penalty", 0, (0.1, False)), ("frequency_penalty", 0.0, (-1,)),
                ("logit_bias", {}, ({"5": 1},))):
            reader().read({"prompt": "5", name: neutral}, False)
            for value in others:
                with self.subTest(name, value=value):
                    error = str(self.refused({"prompt": "5", name: value}))
                    self.assertIn(f"{name}: {json.dumps(value)}; allowed: null or ", error)
                    self.assertIn(json.dumps(neutral), error)
        self.assertIn("banana: unknown; allowed: best_of, echo",
                      str(self.refused({"prompt": "5", "banana": 1})))
        self.assertIn("tools: [{}]", str(self.refused({"messages": user("5"), "tools": [{}]}, True)))
        for body in ([], "a", None, 5):
            self.assertIn("the body: a ", str(self.refused(body)))

    def test_the_model_has_one_name(self):
        self.assertEqual(reader().read({"prompt": "5", "model": "tiny"}, False).tokens, [BOS, 5])
        error = self.refused({"prompt": "5", "model": "gpt-4"})
        self.assertEqual((error.status, error.body()["error"]["code"]), (404, "model_not_found"))

    def test_positions(self):
        prompt = [5] * 20
        self.assertEqual(reader().read({"prompt": prompt}, False).max_tokens, 12)
        self.assertEqual(reader().read({"prompt": prompt, "max_tokens": 12}, False).max_tokens, 12)
        self.assertEqual(str(self.refused({"prompt": prompt, "max_tokens": 13})), "max_tokens: 13 after a "
                         "prompt of 20 tokens; allowed: 1 to 12: the model has 32 positions")
        self.assertEqual(str(self.refused({"prompt": [5] * 32})),
                         "prompt: has 32 tokens; allowed: at most 31: the model has 32 positions")
        endless = reader(positions=None)
        self.assertEqual(endless.read({"prompt": [5] * 99, "max_tokens": 4096}, False).max_tokens, 4096)

    def test_chats(self):
        messages = [{"role": "system", "content": "9"}, *user([{"type": "text", "text": "5 "},
                                                               {"type": "text", "text": "6"}])]
        asked = reader().read({"messages": messages, "max_completion_tokens": 3}, True)
        self.assertEqual(asked.tokens, [BOS, SYSTEM, 9, USER, 5, 6, ASSISTANT])
        self.assertEqual((asked.chat, asked.max_tokens), (True, 3))
        self.assertEqual(reader().read({"messages": user("5")}, True).max_tokens, 32 - 4)
        both = {"messages": user("5"), "max_tokens": 1, "max_completion_tokens": 1}
        self.assertEqual(self.refused(both, True).param, "max_completion_tokens")

    def test_the_system_prompt_is_the_system_message_of_chats_that_have_none(self):
        with_prompt = reader(system_prompt="9 8")
        self.assertEqual(with_prompt.read({"messages": user("5")}, True).tokens,
                         [BOS, SYSTEM, 9, 8, USER, 5, ASSISTANT])
        own = [{"role": "system", "content": "7"}, *user("5")]
        self.assertEqual(with_prompt.read({"messages": own}, True).tokens,
                         [BOS, SYSTEM, 7, USER, 5, ASSISTANT])
        self.assertEqual(with_prompt.prefixes(), [[BOS, 9, 8], [BOS, SYSTEM, 9, 8, USER]])

    def test_bad_chats(self):
        for messages in (None, [], "5", {}):
            self.assertEqual(self.refused({"messages": messages}, True).param, "messages")
        for message in ("5", {}, {"role": "user"}, {"role": "tool", "content": "5"},
                        {"role": [], "content": "5"}, {"role": "user", "content": None},
                        {"role": "user", "content": 5},
                        {"role": "user", "content": []}, {"role": "user", "content": [{"type": "image_url"}]},
                        {"role": "user", "content": "5", "tool_calls": []}):
            with self.subTest(message):
                self.assertEqual(self.refused({"messages": [*user("5"), message]}, True).param, "messages[1]")
        twice = [{"role": "system", "content": "9"}] * 2
        self.assertIn("chat template says: one system message", str(self.refused({"messages": twice}, True)))
        self.assertIn("surrogate", str(self.refused({"messages": user("\ud800")}, True)))
        without = reader()
        without.tokenizer.chat_template = None
        with self.assertRaisesRegex(Refused, "no chat template; allowed: /v1/completions"):
            without.read({"messages": user("5")}, True)


class AnswerTest(unittest.TestCase):
    def answer(self, chat, **options):
        body = {"messages": user("5")} if chat else {"prompt": "5"}
        return Answer(reader().read({**body, **options}, chat), "tiny")

    def test_whole_answers(self):
        message = {"role": "assistant", "content": "7"}
        for chat, kind, said in ((False, "text_completion", {"text": "7"}),
                                 (True, "chat.completion", {"message": message})):
            answer = self.answer(chat).whole("7", "length", 3)
            self.assertEqual(answer["choices"],
                             [{"index": 0, "finish_reason": "length", "logprobs": None, **said}])
            read = 4 if chat else 2
            self.assertEqual(answer["usage"],
                             dict(prompt_tokens=read, completion_tokens=3, total_tokens=read + 3))
            self.assertEqual((answer["object"], answer["model"]), (kind, "tiny"))
            self.assertIs(type(answer["created"]), int)

    def test_chunks(self):
        answer = self.answer(True, stream=True, stream_options={"include_usage": True})
        first, last, usage = answer.chunk("7"), answer.chunk("", "stop"), answer.usage_chunk(1)
        self.assertEqual(first["choices"][0]["delta"], {"role": "assistant", "content": "7"})
        self.assertEqual((first["object"], first["usage"]), ("chat.completion.chunk", None))
        self.assertEqual(last["choices"][0]["delta"], {"content": ""})
        self.assertEqual(last["choices"][0]["finish_reason"], "stop")
        self.assertEqual((usage["choices"], usage["usage"]["completion_tokens"]), ([], 1))
        self.assertEqual({chunk["id"] for chunk in (first, last, usage)}, {first["id"]})
        plain = self.answer(False, stream=True).chunk("7")
        self.assertEqual((plain["object"], plain["choices"][0]["text"]), ("text_completion", "7"))
        self.assertNotIn("usage", plain)


if __name__ == "__main__":
    unittest.main()
