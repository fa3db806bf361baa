"""What of a conversation, a pair or a list of ids becomes tokens, and which of them are trained.

The oracle for ids and masks is transformers' apply_chat_template, for SentencePiece the package mistral-common. Templates
are those of the models in style, tokenizers small ones made here, but for Mixtral's, which is the real one.
"""

import importlib.util
import json
import pathlib
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data import DataConfig
from jaxllm.data import __main__ as command
from jaxllm.data.pipeline import empty_rows
from jaxllm.data.render import Tokenizer, load_tokenizer, make_renderer
from jaxllm.section import UserError

pytest.importorskip("jinja2", reason="chat templates are Jinja")

KIT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are "
    "a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2_TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + "
    "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are "
    "supported!') }}{% endif %}{% endfor %}"
)
# style: (template, special tokens with bos and eos first, end token, whether the tokenizer adds BOS itself)
STYLES = {
    "kit": (KIT, ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"], "</s>", True),
    "kit without tags": (
        KIT.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
        ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"],
        "</s>",
        True,
    ),
    "llama 3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|eot_id|>",
        True,
    ),
    "smollm2": (SMOLLM2, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|im_end|>", False),
    "smollm2 with tags": (SMOLLM2_TAGGED, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|im_end|>", False),
}
SYSTEM = {"role": "system", "content": "be brief"}


def turns(*contents):
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def make_folder(folder, template, special, adds_bos, **config):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = [f"question number {n}: what is {n} plus one?\n\n\nanswer: {n + 1}.\n\n" for n in range(300)]
    library.train_from_iterator(texts, trainer)
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], library.token_to_id(special[0]))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]} | config
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("styles")
    return {
        name: make_folder(base / name.replace(" ", "-"), template, special, adds_bos)
        for name, (template, special, _, adds_bos) in STYLES.items()
    }


def renderer(folder, kind="chat", **options):
    data = DataConfig(kind=kind, tokenizer=str(folder), **options)
    cfg = SimpleNamespace(data=data, model=SimpleNamespace(vocab_size=None, path=None, revision=None))
    return make_renderer(cfg, load_tokenizer(cfg))


def render(folder, messages, **options):
    return renderer(folder, **options)([({"messages": messages}, "chat.jsonl:1")])[0]


def trained(document):
    """Ids of the trained targets; each must be the next token."""
    at = np.flatnonzero(document.loss_weights)
    assert (document.targets[at] == document.tokens[at + 1]).all()
    return document.targets[at].tolist()


def parts(folder, document):
    """Text of each run of trained targets, special tokens written out."""
    at = np.flatnonzero(document.loss_weights)
    tokenizer = Tokenizer.load(folder)
    return [
        tokenizer.decode(document.targets[run]) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(run)
    ]


def theirs(folder, messages):
    """(ids, mask) by transformers."""
    from transformers import AutoTokenizer

    out = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return out["input_ids"], out["assistant_masks"]


# ----------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("style", STYLES)
def test_the_trained_targets_are_the_assistants_texts_and_end_tokens_and_the_ids_the_models_own(folders, style):
    messages = [SYSTEM, *turns("number 1?", "answer: 2.", "and  plus\n one é?", "  3\n\nis the answer 👩‍👧", "?", "x")]
    document = render(folders[style], messages)
    written = [message["content"] for message in messages if message["role"] == "assistant"]
    if style == "llama 3":
        written = [text.strip() for text in written]
    assert parts(folders[style], document) == [text + STYLES[style][2] for text in written]
    assert document.tokens.tolist() == theirs(folders[style], messages)[0]
    assert document.loss_weights[-1] == 0


@pytest.mark.parametrize("style", ["kit", "smollm2 with tags"])
def test_masks_equal_transformers_where_the_template_has_generation_tags(folders, style):
    for messages in (
        [SYSTEM, *turns("question number 0", "answer 0.", "and plus one?", "answer 1.")],
        turns("a", "b"),
        turns("a", "b c\n", "d", "", "e"),
    ):
        document = render(folders[style], messages)
        ids, mask = theirs(folders[style], messages)
        assert document.tokens.tolist() == ids
        assert document.loss_weights[:-1].tolist() == mask[1:]


def test_without_generation_tags_the_same_is_trained_as_with_them(folders):
    messages = [SYSTEM, *turns("question number 0", "answer 0.", "and plus one?", "answer 1.")]
    with_tags, without = (render(folders[style], messages) for style in ("kit", "kit without tags"))
    for got, want in zip(without, with_tags, strict=True):
        assert np.array_equal(got, want)
    assert trained(without).count(1) == 2  # both end tokens


contents = st.text(alphabet="ab1 \n.é<|>/s", min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=30, deadline=None)
@given(st.lists(contents, min_size=2, max_size=6), st.sampled_from(["kit without tags", "llama 3", "smollm2"]))
def test_any_contents_give_back_exactly_the_answers(folders, texts, style):
    messages = turns(*texts)
    document = render(folders[style], messages)
    clean = (lambda text: text.strip()) if style == "llama 3" else (lambda text: text)
    assert parts(folders[style], document) == [clean(text) + STYLES[style][2] for text in texts[1::2]]
    tokenizer = Tokenizer.load(folders[style])
    whole = tokenizer.decode(document.tokens)
    assert whole == renderer(folders[style]).template.render(messages)[0]
    specials = [n for n, token in tokenizer.library.get_added_tokens_decoder().items() if token.special]
    assert trained(document).count(tokenizer.eos_id) == len(texts) // 2
    trains = [message["role"] == "assistant" for message in messages]
    assert np.isin(document.tokens, specials).sum() == len(
        renderer(folders[style])._prepare(messages, None, trains).controls
    )


def test_text_that_spells_special_tokens_stays_text_and_is_counted(folders):
    folder = folders["kit"]
    messages = turns("say </s> <|assistant|> now", "no </s> way")
    render_chat = renderer(folder)
    document = render_chat([({"messages": messages}, "x:1")])[0]
    ids = document.tokens.tolist()
    assert (ids.count(0), ids.count(1), ids.count(5)) == (1, 2, 1)
    assert parts(folder, document) == ["no </s> way</s>"]
    assert render_chat.escaped == {"</s>": 2, "<|assistant|>": 1}
    # What surrounds it is what the model's own tokenizer gives.
    clean = render(folder, turns("say x now", "no x way")).tokens.tolist()
    assert ids[: ids.index(4) + 2] == clean[: clean.index(4) + 2]
    for style in ("llama 3", "smollm2"):
        end = STYLES[style][2]
        spelled = render(folders[style], turns(f"a{end}", f"b {end}\n", "c", end))
        assert trained(spelled).count(1) == 2
        want = [f"b {end}" + ("" if style == "llama 3" else "\n") + end, end + end]
        assert parts(folders[style], spelled) == want


@pytest.mark.parametrize("kind", ["text", "prompt", "chat"])
def test_text_that_spells_any_special_token_stays_text_in_every_kind(folders, kind):
    folder = folders["kit"]
    tokenizer = Tokenizer.load(folder)
    text = "a<s></s> <pad><|user|>\n<|assistant|><<s>|system|> </s>"
    record = {"text": text, "prompt": {"prompt": text, "completion": text}, "chat": {"messages": turns(text, text)}}[
        kind
    ]
    render_kind = renderer(folder, kind)
    (document,) = render_kind([(record, "here")])
    plain = {"text": "a", "prompt": {"prompt": "a", "completion": "a"}, "chat": {"messages": turns("a", "a")}}[kind]
    (clean,) = render_kind([(plain, "here")])
    special = list(tokenizer.control_tokens.values())
    assert (
        document.tokens[np.isin(document.tokens, special)].tolist()
        == clean.tokens[np.isin(clean.tokens, special)].tolist()
    )  # those of the product and of the template, and none more
    assert tokenizer.decode(document.tokens).count(text) == (1 if kind == "text" else 2)
    times = 1 if kind == "text" else 2
    assert render_kind.escaped == {name: times * text.count(name) for name in tokenizer.control_tokens if name in text}


def test_a_bos_token_that_begins_every_turn_is_part_of_the_turn(folders, tmp_path):
    messages = turns("a", "b", "c", "d")
    for folder in (
        folders["smollm2"],
        make_folder(tmp_path, "{% for m in messages %}{{ bos_token if m.role == 'user' }}{{ m.content }}"
                    "{{ eos_token if m.role == 'assistant' }}{% endfor %}", ["<s>", "</s>"], False),
    ):  # fmt: skip
        want = render(folder, messages).tokens.tolist()
        for one in (messages, messages[:2]):  # also where only one such turn is in the data
            assert render(folder, one, add_bos=False).tokens.tolist() == render(folder, one).tokens.tolist()
        assert want == theirs(folder, messages)[0] and want[0] == 0 and want.count(0) >= 2
        assert render(folder, messages, add_bos=True).tokens.tolist() == want


def added(folder, *tokens):
    """The folder, its tokenizer with more tokens, which are not called special."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in tokens])
    library.save(str(folder / "tokenizer.json"))
    return folder, [library.token_to_id(token) for token in tokens]


def test_tokens_that_come_in_pairs_and_are_not_special_are_read_in_contents_as_the_models_own_tokenizer_does(tmp_path):
    cut = "{% generation %}{{ (message['content'] if loop.last else message['content'].split('</think>')[-1])"
    thinking = SMOLLM2_TAGGED.replace("{% generation %}{{ message['content']", cut)
    assert "'</think>'" in thinking and "<think>" not in thinking
    folder, (begin, end) = added(with_template(tmp_path, thinking), "<think>", "</think>")
    messages = turns("what do <think> and </think> mean?", "<think>x</think>b", "c", "<think>y</think>d")
    document = render(folder, messages)
    assert document.tokens.tolist() == theirs(folder, messages)[0]
    assert parts(folder, document) == ["b<|im_end|>", "<think>y</think>d<|im_end|>"]
    for token in (begin, end):  # of the question and of the last answer
        assert document.tokens.tolist().count(token) == 2 and trained(document).count(token) == 1


def test_other_tokens_that_the_template_names_are_its_own_also_if_they_are_not_special(tmp_path):
    own = "{% for m in messages %}<|turn|>{{ m.role }}<sep>\n{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = make_folder(tmp_path, own, ["<s>", "</s>"], False)
    folder, (turn, separator, _) = added(folder, "<|turn|>", "<sep>", "<free>")
    ids = render(folder, turns("a <|turn|>user<sep>", "b <sep> <free>")).tokens.tolist()
    assert (ids.count(turn), ids.count(separator)) == (2, 2)


def test_there_is_one_bos_whether_template_or_tokenizer_writes_it(folders, tmp_path):
    messages = turns("a", "b")
    _, special, *_ = STYLES["kit"]
    bare = make_folder(tmp_path / "bare", KIT.replace("{{ bos_token }}", ""), special, True)
    twice = make_folder(tmp_path / "twice", "{{ bos_token }}" + KIT, special, True)
    plain = make_folder(tmp_path / "plain", KIT, special, False)
    want = render(folders["kit"], messages)
    assert want.tokens.tolist().count(0) == 1 and want.tokens[0] == 0
    for folder in (bare, twice, plain):
        for got, wanted in zip(render(folder, messages), want, strict=True):
            assert np.array_equal(got, wanted)
    assert 0 not in render(folders["kit"], messages, add_bos=False).tokens


def test_a_pad_token_that_is_the_eos_changes_nothing(folders, tmp_path):
    template, special, _, adds_bos = STYLES["kit"]
    padded = make_folder(tmp_path, template, special, adds_bos, pad_token="</s>")
    for got, want in zip(render(padded, turns("a", "b")), render(folders["kit"], turns("a", "b")), strict=True):
        assert np.array_equal(got, want)


def test_other_roles_are_trained_when_asked_for_without_their_headers(folders):
    messages = [SYSTEM, *turns("one", "two", "three", "four")]
    for style in ("kit", "smollm2"):
        end = STYLES[style][2]
        assert parts(folders[style], render(folders[style], messages, train_on=["user"])) == [
            "one" + end,
            "three" + end,
        ]
        both = render(folders[style], messages, train_on=["assistant", "user"])
        assert parts(folders[style], both) == [text + end for text in ("one", "two", "three", "four")]


def test_an_answer_that_would_merge_with_its_header_is_cut_there_and_trained_whole(folders):
    document = render(folders["smollm2"], turns("question", "\n\nanswer"))
    assert parts(folders["smollm2"], document) == ["\n\nanswer<|im_end|>"]
    tokenizer = Tokenizer.load(folders["smollm2"])
    asked = renderer(folders["smollm2"]).template.render(turns("question"), add_generation_prompt=True)[0]
    begin = int(np.argmax(document.loss_weights)) + 1
    assert tokenizer.decode(document.tokens[:begin]) == asked


@pytest.mark.parametrize("trims", [False, True])  # whether the tokenizer leaves the space out of a token's place
def test_a_header_that_ends_with_a_space_keeps_it_from_the_answer(tmp_path, trims):
    from tokenizers import processors

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    folder = with_template(tmp_path, template)
    library = Tokenizer.load(folder).library
    library.post_processor = processors.ByteLevel(trim_offsets=trims)
    library.save(str(folder / "tokenizer.json"))
    assert "\u0120number" in library.encode("assistant: number").tokens, "they would merge"
    header, document = library.encode("assistant: ").ids, render(folder, turns("a", "number"))
    begin = int(np.argmax(document.loss_weights)) + 1
    assert document.tokens[begin - len(header) : begin].tolist() == header
    assert parts(folder, document) == ["number<|im_end|>"]


def with_template(tmp_path, template, style="smollm2"):
    return make_folder(tmp_path / "own", template, STYLES[style][1], STYLES[style][3])


def test_a_header_is_found_where_the_template_has_no_generation_prompt(tmp_path):
    folder = with_template(tmp_path, SMOLLM2[: SMOLLM2.index("{% if add_generation_prompt")])
    assert parts(folder, render(folder, turns("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_template_that_writes_earlier_turns_otherwise_than_the_last_is_read_through_stand_ins(tmp_path):
    thinking = SMOLLM2.replace(
        "message['role'] + '\n' +",
        "message['role'] + '\n' + ('<think>\n\n</think>\n\n' if loop.last and message['role'] == 'assistant' else '') +",
    )
    assert thinking != SMOLLM2
    folder = with_template(tmp_path, thinking)
    got = parts(folder, render(folder, turns("a", "b", "c", "d")))
    assert got == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


def test_end_tokens_outside_of_generation_tags_are_trained(tmp_path):
    outside = SMOLLM2_TAGGED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
    assert outside != SMOLLM2_TAGGED
    folder = with_template(tmp_path, outside)
    assert parts(folder, render(folder, turns("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_turn_may_end_with_the_eos_where_the_conversation_ends_with_another_token(tmp_path):
    outside = SMOLLM2_TAGGED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
    folder = with_template(tmp_path, outside + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    assert parts(folder, render(folder, turns("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == "
    "'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def test_an_eos_that_closes_the_conversation_stands_behind_the_last_turn_only(tmp_path):
    special = ["<s>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    folder = make_folder(tmp_path, PHI3, special, False)
    last = "f\n<|end|>\n<|endoftext|>"
    messages = [SYSTEM, *turns("a", "b", "c <|end|>", "d <|endoftext|>", "e", "f\n")]
    for asked, want in (
        (messages, ["b<|end|>", "d <|endoftext|><|end|>", last]),
        (messages[:3], ["b<|end|>\n<|endoftext|>"]),
    ):
        document = render(folder, asked)
        assert parts(folder, document) == want
        assert (document.tokens == Tokenizer.load(folder).library.token_to_id("<|end|>")).sum() == len(asked)
    plain = [SYSTEM, *turns("a", "b", "c", "d")]
    assert render(folder, plain).tokens.tolist() == theirs(folder, plain)[0]
    assert parts(folder, render(folder, [*plain, *turns("e")])) == ["b<|end|>", "d<|end|>"]
    without = make_folder(
        tmp_path / "without", PHI3.replace("message['content'] + '<|end|>\n'", "message['content']"), special, False
    )
    with pytest.raises(UserError, match="no special token after"):
        render(without, plain)


@pytest.mark.parametrize(
    "tagged, behind", [("message['content'] + '<|end|>\n'", ""), ("message['content'] + '<|end|>'", "\n")]
)
def test_tags_that_hold_a_turns_end_token_are_believed_where_the_conversation_ends_with_another(
    tmp_path, tagged, behind
):
    special = ["<s>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    written = "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
    inside = "{{'<|assistant|>\n'}}{% generation %}{{ " + tagged + " }}{% endgeneration %}" + behind
    folder = make_folder(tmp_path, PHI3.replace(written, inside), special, False)
    for messages in (turns("a", "b"), turns("a", "b", "c", "d <|end|>"), turns("a", "", "c")):
        document = render(folder, messages)
        ends = "<|end|>" if behind else "<|end|>\n"
        assert parts(folder, document) == [m["content"] + ends for m in messages if m["role"] == "assistant"]
    (ids, mask), document = theirs(folder, turns("a", "b", "c", "d")), render(folder, turns("a", "b", "c", "d"))
    assert document.tokens.tolist() == ids and document.loss_weights[:-1].tolist() == mask[1:]


def test_the_end_of_the_turn_before_is_not_taken_for_that_of_an_empty_answer(tmp_path):
    folder = with_template(
        tmp_path,
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}<|im_end|>{% endfor %}",
    )
    assert parts(folder, render(folder, turns("a", "", "c", "d"))) == ["<|im_end|>", "d<|im_end|>"]


GPT_OSS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|start|>user<|message|>{{ m['content'] }}<|end|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}{% if loop.last and not add_generation_prompt %}"
    "<|return|>{% else %}<|end|>{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize("answer", ["b", "", " ", "b <|message|>"])
def test_a_token_inside_of_a_turn_is_not_taken_for_its_end_where_the_last_turn_ends_otherwise(tmp_path, answer):
    special = ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"]
    head = "<|channel|>final<|message|>"
    document = render(make_folder(tmp_path / "a", GPT_OSS, special, False), turns("a", answer, "c", "d"))
    assert parts(tmp_path / "a", document) == [f"{head}{answer}<|end|>", f"{head}d<|return|>"]
    always = GPT_OSS.replace(" and not add_generation_prompt", "")  # then nothing tells how an earlier turn ends
    with pytest.raises(UserError, match="what is trained cannot be found"):
        render(make_folder(tmp_path / "b", always, special, False), turns("a", answer, "c", "d"))


@pytest.mark.parametrize(
    "template, complaint",
    [
        # what follows an earlier turn is the header of the next one, special too
        ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
         "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% if loop.last %}<|im_end|>"
         "{% endif %}{% endfor %}", "no special token after"),
        ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}", "no special token after"),
        ("{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}", "cannot be told from what stands"),
        ("{% for m in messages %}{% if loop.last %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
         "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}", "no part holds message 2"),
    ],
)  # fmt: skip
def test_a_template_in_which_the_answers_cannot_be_found_is_refused(tmp_path, template, complaint):
    folder = with_template(tmp_path, template)
    with pytest.raises(UserError, match=f"chat.jsonl:1: .*template.*{complaint}"):
        render(folder, turns("ab", "cd", "ef", "gh"))


def test_odd_conversations_are_named_with_their_roles_and_the_templates_complaint_or_left_out_and_counted(
    folders, tmp_path
):
    strict = (
        "{% for m in messages %}{% if (m['role']=='user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + KIT
    )
    folder = with_template(tmp_path, strict, "kit")
    odd = turns("hi", "hi", "hi") + turns("hi")
    with pytest.raises(UserError, match=r"odd\.jsonl:21: .*roles must alternate.*user, assistant, user, user"):
        renderer(folder)([({"messages": odd}, "odd.jsonl:21")])
    bad = {
        "template": (odd, "alternate"),
        "no answer": (turns("a"), r"no message of a role that is trained \(assistant\)"),
        "marks": (turns("a", "b\U0010fff0"), "private-use"),
    }
    for messages, complaint in bad.values():
        with pytest.raises(UserError, match=complaint):
            render(folder, messages)
    skipping = renderer(folder, on_bad="skip")
    records = [(messages, name) for name, (messages, _) in bad.items()] + [(turns("a", "b"), "good")]
    out = skipping([({"messages": messages}, where) for messages, where in records])
    assert [len(document.tokens) > 0 for document in out] == [False] * len(bad) + [True]
    assert skipping.left_out == {"skipped": len(bad)} and skipping.examples["skipped"].startswith("template: ")
    # Beside calls of tools there may be no content, which is not the word None.
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert "None" not in Tokenizer.load(folder).decode(render(folder, [*turns("a"), call, *turns("x", "c")]).tokens)
    # A role that the template does not know is no error where it writes any role.
    tool = [*turns("a", "b"), {"role": "tool", "content": "4"}, *turns("x", "c")[1:]]
    assert parts(folders["smollm2"], render(folders["smollm2"], tool)) == ["b<|im_end|>", "c<|im_end|>"]


def test_a_long_conversation_stops_the_run_or_is_cut_at_its_end_or_left_out(folders):
    folder, messages = folders["kit"], turns("go", "one two three " * 60)
    whole = render(folder, messages, seq_len=4096)
    length = len(whole.tokens)
    with pytest.raises(UserError, match=rf"chat\.jsonl:1: {length} tokens, data\.seq_len is 64.*truncate"):
        render(folder, messages, seq_len=64)
    cutting = renderer(folder, seq_len=64, on_long="truncate")
    (cut,) = cutting([({"messages": messages}, "x:1")])
    assert len(cut.tokens) == 64 and np.array_equal(cut.tokens, whole.tokens[:64])
    assert cut.loss_weights.sum() == whole.loss_weights[:63].sum() > 40  # what survived, and no invented end
    assert 1 not in trained(cut) and cut.loss_weights[-1] == 0
    lost = {
        "documents": 1,
        "tokens": length - 64,
        "answer_tokens": int(whole.loss_weights[63:].sum()),
        "without_answer": 0,
    }
    assert cutting.truncated == lost and "x:1" in cutting.examples["truncated"]
    skipping = renderer(folder, seq_len=64, on_long="skip")
    assert len(skipping([({"messages": messages}, "x:1")])[0].tokens) == 0
    assert skipping.left_out == {"longer than data.seq_len": 1} and "x:1" in str(skipping.examples)
    with pytest.raises(UserError, match=r"x:2: .*nothing that is trained is left before the cut"):
        cutting([({"messages": turns("one two three " * 60, "go")}, "x:2")])
    assert len(render(folder, messages, seq_len=length).tokens) == length


def test_templates_are_found_in_a_file_beside_the_tokenizer_or_named(folders, tmp_path):
    template, special, _, adds_bos = STYLES["kit"]
    messages = turns("a", "b")
    bare = make_folder(tmp_path / "bare", None, special, adds_bos)
    with pytest.raises(UserError, match=r"data\.chat_template: .*has no chat template"):
        render(bare, messages)
    (tmp_path / "own.jinja").write_text(template)
    want = render(folders["kit"], messages).tokens.tolist()
    assert render(bare, messages, chat_template=str(tmp_path / "own.jinja")).tokens.tolist() == want
    (bare / "chat_template.jinja").write_text(template)
    assert render(bare, messages).tokens.tolist() == want
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"data\.chat_template: .*broken\.jinja:1"):
        render(bare, messages, chat_template=str(tmp_path / "broken.jinja"))
    with pytest.raises(UserError, match=r"data\.chat_template: no file"):
        render(bare, messages, chat_template=str(tmp_path / "absent.jinja"))


TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}


def test_tools_are_rendered_with_the_template_for_them_and_never_left_out(folders, tmp_path):
    with_tools = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + SMOLLM2
    by_name = [{"name": "default", "template": SMOLLM2}, {"name": "tool_use", "template": with_tools}]
    listed = make_folder(tmp_path / "listed", by_name, STYLES["smollm2"][1], False)
    record = {"messages": turns("a", "b"), "tools": [TOOL]}
    got = renderer(listed)([(record, "t.jsonl:1"), ({"messages": turns("a", "b")}, "t.jsonl:2")])
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(listed)
    for document, tools in zip(got, ([TOOL], None), strict=True):
        want = library.apply_chat_template(record["messages"], tools=tools, return_dict=True)["input_ids"]
        assert document.tokens.tolist() == want
    beside = make_folder(tmp_path / "beside", None, STYLES["smollm2"][1], False)
    (beside / "chat_template.jinja").write_text(SMOLLM2)
    with pytest.raises(UserError, match=r"t\.jsonl:1: it has tools, but the chat template .* writes nothing of them"):
        renderer(beside)([(record, "t.jsonl:1")])
    (beside / "additional_chat_templates").mkdir()
    (beside / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    assert renderer(beside)([(record, "")])[0].tokens.tolist() == got[0].tokens.tolist()
    assert renderer(beside).fingerprint != renderer(folders["smollm2"]).fingerprint
    Tokenizer.load(beside).save(tmp_path / "saved")
    assert renderer(tmp_path / "saved")([(record, "")])[0].tokens.tolist() == got[0].tokens.tolist()


@pytest.mark.parametrize("style", ["smollm2", "smollm2 with tags"])
def test_a_turn_that_says_it_is_not_trained_is_read_and_not_trained(folders, style):
    messages = turns("a", "b", "c", "b")
    whole = render(folders[style], messages)
    for number, left in ((1, 3), (3, 1)):
        marked = [dict(message) for message in messages]
        marked[number]["weight"], marked[left]["weight"] = 0, 1
        document = render(folders[style], marked)
        assert document.tokens.tolist() == whole.tokens.tolist() and parts(folders[style], document) == ["b<|im_end|>"]
        both = np.flatnonzero(whole.loss_weights)
        assert np.flatnonzero(document.loss_weights).tolist() == (both[2:] if left == 3 else both[:2]).tolist()
    marked[1]["weight"] = marked[3]["weight"] = 0
    with pytest.raises(UserError, match="says that it is not"):
        render(folders[style], marked)
    with pytest.raises(
        UserError, match="message 1 says that it is trained, but its role 'user' is not in data.train_on"
    ):
        render(folders[style], [messages[0] | {"weight": 1}, *messages[1:]])


TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% for call in m.tool_calls or [] %}{% generation %}call {{ call.name }}{% endgeneration %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


def test_every_assistant_turn_has_its_own_part_inside_generation_tags(tmp_path):
    folder = with_template(tmp_path, TAGGED)
    end = "<|im_end|>"
    assert parts(folder, render(folder, turns("a", "", "c", "d"))) == [end, "d" + end], "of an empty answer its end"
    assert parts(folder, render(folder, turns("a", "b", "c", "b"))) == ["b" + end] * 2
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    back = {"role": "tool", "content": "4"}
    got = render(folder, [*turns("a"), call, back, {"role": "assistant", "content": "four"}])
    assert parts(folder, got) == ["call f" + end, "four" + end]
    both = call | {"content": "so"}
    chain = [*turns("a"), both, back, call, back, {"role": "assistant", "content": "four"}]
    assert parts(folder, render(folder, chain)) == ["socall f" + end, "call f" + end, "four" + end]
    with pytest.raises(UserError, match="2 parts stand between two of which one is not trained"):
        render(folder, [*chain[:3], call | {"weight": 0}, *chain[4:]])
    quiet = render(folder, [*turns("a"), call | {"weight": 0}, back, {"role": "assistant", "content": "four"}])
    assert parts(folder, quiet) == ["four" + end]


@pytest.mark.parametrize(
    "template, complaint",
    [
        # as many parts as turns, but all of the last one
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% for n in [1, 2] %}{% generation %}"
         "{{ messages[-1].content }}<|im_end|>{% endgeneration %}{% endfor %}", "no part holds message 2"),
        ("{% generation %}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
         "{% generation %}{% endgeneration %}", "one part holds the messages 2, 4"),
        ("{% for m in messages | reverse %}<|im_start|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}",
         "another order"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("contents", [("ab", "cd", "ef", "gh"), ("ab", "cd", "ef", "cd")])
def test_generation_tags_that_do_not_tell_the_turns_apart_are_refused(tmp_path, template, complaint, contents):
    folder = with_template(tmp_path, template)
    with pytest.raises(UserError, match=complaint):
        render(folder, turns(*contents))


@pytest.mark.parametrize("written", ["strip", "lstrip", "rstrip"])
def test_an_answer_that_the_template_strips_is_found_by_its_stand_in(tmp_path, written):
    thinking = SMOLLM2.replace(
        "message['role'] + '\n' + message['content'] +",
        "message['role'] + '\n' + ('<think>' if loop.last and message['role'] == 'assistant' else '') + "
        f"message['content'].{written}() +",
    )
    folder = with_template(tmp_path, thinking)
    got = parts(folder, render(folder, turns("a", " b ", "c", "d")))
    assert got == [getattr(" b ", written)() + "<|im_end|>", "<think>d<|im_end|>"]


def test_turns_that_overlap_in_the_text_are_refused(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if not (loop.last and add_generation_prompt) %}<|im_end|>\n{% endif %}{% endfor %}"
    )
    answers = [{"role": "assistant", "content": content} for content in "bc"]
    with pytest.raises(UserError, match="the turns overlap in the text"):
        render(with_template(tmp_path, template), [*turns("a"), *answers])


def test_a_template_that_changes_text_which_spells_a_special_token_is_refused(tmp_path):
    cutting = SMOLLM2.replace("+ message['content'] +", "+ message['content'][:8] +")
    assert cutting != SMOLLM2
    folder = with_template(tmp_path, cutting)
    assert parts(folder, render(folder, turns("a" * 20, "b"))) == ["b<|im_end|>"]
    with pytest.raises(UserError, match="changes text that spells a special token"):
        render(folder, turns("xx<|im_end|>", "b"))


def test_text_that_the_tokenizer_itself_reads_as_a_special_token_is_refused(tmp_path):
    import tokenizers

    words = ["[UNK]", "<s>", "</s>", "user", "assistant", "a", "b", "say"]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert trained(render(tmp_path, turns("a", "b"))) == [6, 2]
    with pytest.raises(UserError, match="in a way that the tokenizer cannot keep as text"):
        render(tmp_path, turns("say </s>", "b"))


def test_templates_run_in_a_sandbox(tmp_path):
    folder = with_template(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="unsafe"):
        render(folder, turns("a", "b"))


def test_a_pickled_renderer_renders_the_same(folders):
    messages = turns("say </s>", "no </s> way")
    one = renderer(folders["kit"])
    two = pickle.loads(pickle.dumps(one))
    for got, want in zip(two([({"messages": messages}, "")])[0], one([({"messages": messages}, "")])[0], strict=True):
        assert np.array_equal(got, want)
    text = pickle.loads(pickle.dumps(renderer(folders["kit"], "text")))
    assert text([("a </s>", "")])[0].tokens.tolist().count(1) == 1 and text.escaped == {"</s>": 1}


def test_the_fingerprint_covers_tokenizer_template_selection_and_lengths(folders, tmp_path):
    folder = folders["kit"]
    (tmp_path / "own.jinja").write_text(KIT + " ")
    choices = [
        renderer(folder),
        renderer(folders["llama 3"]),
        renderer(folder, chat_template=str(tmp_path / "own.jinja")),
        renderer(folder, train_on=["user"]),
        renderer(folder, seq_len=100),
        renderer(folder, on_long="skip"),
        renderer(folder, "prompt"),
        renderer(folder, "prompt", train_on=["prompt", "completion"]),
        renderer(folder, "prompt", seq_len=100),
        renderer(folder, "prompt", on_long="skip"),
        renderer(folder, "text"),
        renderer(folder, "tokens"),
    ]
    assert len({choice.fingerprint for choice in choices}) == len(choices)
    assert renderer(folder).fingerprint == choices[0].fingerprint


# ------------------------------------------------------------------------------------------------------ prompts, tokens


def pair(folder, prompt, completion, **options):
    return renderer(folder, "prompt", **options)([({"prompt": prompt, "completion": completion}, "p.jsonl:1")])[0]


def test_a_prompt_keeps_its_own_tokens_and_all_of_the_completion_and_the_eos_are_trained(folders):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(folders["kit"] / "tokenizer.json"))
    prompt, completion = "what is 3 plus one? answer: ", "4."
    ids = [library.encode(text, add_special_tokens=False).ids for text in (prompt, completion)]
    joint = library.encode(prompt + completion, add_special_tokens=False).ids
    assert joint[: len(ids[0])] != ids[0]  # the border would be lost
    document = pair(folders["kit"], prompt, completion)
    assert document.tokens.tolist() == [0, *ids[0], *ids[1], 1]
    assert trained(document) == [*ids[1], 1]
    assert trained(pair(folders["kit"], prompt, completion, add_eos=False)) == ids[1]
    assert trained(pair(folders["kit"], prompt, completion, train_on=["prompt", "completion"])) == [*ids[0], *ids[1], 1]


def test_pairs_that_cannot_be_used_are_named_or_counted(folders):
    for prompt, completion, complaint in (("a", "", "completion is empty"), ("a", None, "completion is null")):
        with pytest.raises(UserError, match=rf"p\.jsonl:1: the {complaint}"):
            pair(folders["kit"], prompt, completion)
    with pytest.raises(UserError, match=r"p\.jsonl:1: nothing in it is trained"):
        pair(folders["kit"], "", "a", add_bos=False, add_eos=False)  # a first token is no target
    with pytest.raises(UserError, match=r"data\.train_on"):
        pair(folders["kit"], "a", "b", train_on=["assistant"])
    with pytest.raises(UserError, match=r"p\.jsonl:1: 4 tokens, data\.seq_len is 3"):
        pair(folders["kit"], "a", "b", seq_len=3)
    with pytest.raises(UserError, match="nothing that is trained is left"):
        pair(folders["kit"], "a b c", "d", seq_len=3, on_long="truncate")
    spelled = pair(folders["kit"], "a </s>", "b </s>")
    assert spelled.tokens.tolist().count(1) == 1 and trained(spelled)[-1] == 1


def test_tokens_are_trained_as_they_are_and_refused_beyond_the_embedding():
    cfg = SimpleNamespace(data=DataConfig(kind="tokens"), model=SimpleNamespace(vocab_size=300, path=None))
    assert load_tokenizer(cfg) is None
    render_tokens = make_renderer(cfg, None)
    (document,) = render_tokens([(np.array([5, 6, 7], np.uint16), "a.bin")])
    assert (document.tokens.tolist(), trained(document)) == ([5, 6, 7], [6, 7])
    with pytest.raises(UserError, match=r"a\.bin: token id 300, but the embedding has 300 rows"):
        render_tokens([(np.array([5, 300]), "a.bin")])


# -------------------------------------------------------------------------------------------------------------- Mixtral


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A folder with the real tokenizer.model of Mixtral 8x7B."""
    for package in ("mistral_common", "sentencepiece"):
        if not importlib.util.find_spec(package):
            pytest.skip('pip install "mistral-common[sentencepiece]"')
    package = pathlib.Path(importlib.util.find_spec("mistral_common").submodule_search_locations[0])
    folder = tmp_path_factory.mktemp("mixtral")
    (folder / "tokenizer.model").write_bytes((package / "data" / "tokenizer.model.v1").read_bytes())
    return folder


def test_a_tokenizer_model_gives_the_ids_of_mistral_common(mixtral):
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    ours, real = Tokenizer.load(mixtral), SentencePieceTokenizer(str(mixtral / "tokenizer.model"))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.adds_bos) == (32000, 1, 2, True)
    spaces = ["a" + " " * count + "b" for count in range(40)]
    source = pathlib.Path(json.__file__).read_text()  # indentation is what another order of merges gets wrong
    texts = [source, *spaces, "café cafe\u0301", "\t\tx\r\ny\n\n", "👨‍👩‍👧", "</s> [INST] <s>", "", " ", "漢字"]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == real.encode(text, bos=False, eos=False)
        assert ours.decode(ids) == text


def test_a_tokenizer_model_gives_the_ids_of_mistral_common_for_any_text(mixtral):
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    ours, real = Tokenizer.load(mixtral), SentencePieceTokenizer(str(mixtral / "tokenizer.model"))

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60) | st.text(alphabet="ab  \n\t.1éi", max_size=60))
    def check(text):
        assert ours.encode_batch([text])[0].tolist() == real.encode(text, bos=False, eos=False)

    check()


def test_mixtrals_answers_are_trained_with_its_template_and_without(mixtral, tmp_path):
    messages = turns("one", "two  three\n    four", "five", "six </s>")
    (tmp_path / "mixtral.jinja").write_text(MIXTRAL)
    document = render(mixtral, messages, chat_template=str(tmp_path / "mixtral.jinja"))
    assert parts(mixtral, document) == ["two  three\n    four</s>", "six </s></s>"]
    assert document.tokens[0] == 1 and trained(document).count(2) == 2
    assert document.tokens.tolist().count(1) == 1 and document.tokens.tolist().count(2) == 2

    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    document = render(mixtral, messages)
    real = MistralTokenizer.from_file(str(mixtral / "tokenizer.model"))
    asked = real.encode_chat_completion(ChatCompletionRequest(messages=messages[:3])).tokens
    assert document.tokens[: len(asked)].tolist() == asked
    assert parts(mixtral, document) == ["two  three\n    four</s>", "six </s></s>"]
    with pytest.raises(UserError, match=r"chat\.jsonl:1: mistral-common complains.*roles: user, assistant, user"):
        render(mixtral, turns("a", "b", "c"))


def test_a_completion_goes_on_from_its_prompt_without_a_space_of_the_tokenizers(mixtral):
    document = pair(mixtral, "what is 3 plus one? answer: ", "4.")
    tokenizer = Tokenizer.load(mixtral)
    assert tokenizer.decode(document.tokens) == "<s> what is 3 plus one? answer: 4.</s>"
    assert tokenizer.library.id_to_token(trained(document)[0]) == "4"
    # without a prompt it is a text like any other
    assert tokenizer.library.id_to_token(trained(pair(mixtral, "", "4."))[0]) == "▁"


def test_the_rows_that_the_command_shows_keep_the_spaces_that_a_stretch_begins_with(mixtral):
    document = pair(mixtral, "what is 3 plus one?", " it is four")
    rows = empty_rows(1, len(document.tokens) + 2)
    rows["tokens"][0, :-2], rows["targets"][0, :-2] = document.tokens, document.targets
    rows["loss_weights"][0, :-2], rows["segment_ids"][0, :-2] = document.loss_weights, 1
    shown = list(command._spans(Tokenizer.load(mixtral), rows, 0))
    assert shown == [("<s> what is 3 plus one?", False), (" it is four</s>", True)]


def test_files_that_are_no_such_tokenizer_are_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff")
    with pytest.raises(UserError, match="is no SentencePiece"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UserError, match="tekken"):
        Tokenizer.load(tmp_path / "tekken.json")


def test_a_vocabulary_as_large_as_llama_3_s_keeps_spelled_control_tokens_text(tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(128_000)} | {"[UNK]": 128_000}, "[UNK]")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s+|\S+"), "isolated")
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    library.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }}<|eot_id|>{% endfor %}"
    settings = {"bos_token": names[0], "eos_token": names[2], "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    document = render(tmp_path, turns("w1 <|eot_id|> w2", "w3"))
    assert (document.tokens == library.token_to_id("<|eot_id|>")).sum() == 2  # one per turn, none for the text
    (text,) = renderer(tmp_path, kind="text")([("w127999", "here")])  # ids that 16 bits do not hold
    assert text.tokens.tolist() == [127_999, library.token_to_id("<|eot_id|>")]


def test_an_end_token_behind_the_generation_tags_is_trained_although_another_token_ends_them(tmp_path):
    turn = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</tool_call>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    folder, _ = added(
        with_template(
            tmp_path, "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "<|im_end|>\n{% endfor %}"
        ),
        "</tool_call>",
    )
    document = render(folder, turns("hello", "hello"))
    assert parts(folder, document) == ["hello</tool_call><|im_end|>"]
    assert trained(document)[-1] == Tokenizer.load(folder).library.token_to_id("<|im_end|>")
