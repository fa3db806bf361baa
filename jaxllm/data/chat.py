"""Conversations to tokens, with the model's own chat template, and which of them are trained.

The ids are those that the tokenizer gives for the whole rendered text, template and contents alike, with two exceptions.
What a *content* says stays text even if it spells a special token: the template's own special tokens are told apart by
a second rendering in which such text is marked; _control_ids says which tokens count. And where a token would reach
across the beginning of a trained part (the newline of a header and one that an answer begins with), the text is cut
there, since that is where the model will begin when it is asked.

Trained is what the template writes for a turn after its header, up to and with its end token. The parts come from the
template's generation tags if it has them. If not, they are found by rendering beginnings of the conversation, with and
without the generation prompt, or, where a template writes earlier turns otherwise than the last one, by rendering the
conversation with stand-ins for the contents; either way what was rendered must agree with the whole text character by
character, or the conversation is refused. A turn without an end token is refused too: the model would never stop.

Templates run in jinja2's sandbox with the names that transformers gives them. `strftime_now` formats one fixed day, not
today: a run that is resumed tomorrow sees the same tokens. Images and sounds are not here.
"""

import bisect
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re

import numpy as np

from jaxllm.data.render import (
    EMPTY,
    MORE_TEMPLATES,
    BadRecord,
    Renderer,
    control_pattern,
    strings_of,
    tokenizer_settings,
)
from jaxllm.section import UserError

TODAY = datetime.datetime(2024, 7, 26)  # the day that Llama 3's templates name when they are told none
# Private-use characters that stand in renderings for what is looked for; data that holds them is refused.
BEGIN, END, TEXT_BEGIN, TEXT_END, CONTENT, CONTENT_END = map(chr, range(0x10FFF0, 0x10FFF6))
MARKS = re.compile(f"[{BEGIN}-{CONTENT_END}]")
NO_END = "it writes no special token after a turn, so none could be trained as its end"
RENAMED = 0x100000  # private-use characters from here on stand for special tokens; see _renamed


class ChatTemplate:
    """A chat template: `render` gives the text and the parts inside generation tags. Picklable.

    source: Jinja. names: {"bos_token": ..., ...}, the special tokens that it may write. where: its file, for messages.
    tool_source: another template for conversations with tools, as some models have; None: the same.
    """

    def __init__(self, source, names, where, tool_source=None):
        self.source, self.names, self.where, self.tool_source = source, names, where, tool_source
        self.sources = tuple(source for source in (source, tool_source) if source is not None)
        self._tagged = {source: re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None for source in self.sources}
        self._compiled  # noqa: B018  a template that is no Jinja is told now

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    def has_generation_tags(self, tools):
        """Whether the template for conversations with these tools says what is trained."""
        return self._tagged[self._source(tools)]

    def _source(self, tools):
        return self.tool_source if tools and self.tool_source is not None else self.source

    @functools.cached_property
    def _compiled(self):
        """{source: compiled}."""
        return {source: self._compile(source) for source in self.sources}

    def _compile(self, source):
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise UserError('data.kind: "chat" needs the package jinja2 (3.1.6 or newer)') from None

        class Generation(jinja2.ext.Extension):
            """{% generation %} ... {% endgeneration %}: what is inside is written between two marks."""

            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller):
                return BEGIN + caller() + END

        def raise_exception(message):
            raise jinja2.exceptions.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = TODAY.strftime
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"data.chat_template: {self.where}:{error.lineno}: {error.message}") from None

    def render(self, messages, tools=None, add_generation_prompt=False, like=None):
        """(text, [(begin, end)] of what generation tags enclose, be it nothing). Raises BadRecord with the template's
        complaint. like: the tools that the template is chosen for, by default `tools`."""
        import jinja2

        try:
            marked = self._compiled[self._source(like or tools)].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise BadRecord(f"the chat template complains: {error}") from None
        parts = re.split(f"([{BEGIN}{END}])", marked)
        text, opened, spans = [], [], []
        length = 0
        for part in parts:
            if part == BEGIN:
                opened.append(length)
            elif part == END:
                begin = opened.pop()
                if not opened:
                    spans.append((begin, length))
            else:
                text.append(part)
                length += len(part)
        return "".join(text), spans


def find_template(tokenizer, data):
    """The ChatTemplate of data.chat_template, else of the tokenizer's folder (chat_template.jinja, then
    tokenizer_config.json); None if there is none. Of several by name it has "default", and "tool_use" for conversations
    with tools, as transformers chooses (tokenization_utils_base, get_chat_template)."""
    settings = tokenizer_settings(tokenizer.folder)
    extra = settings.get("extra_special_tokens")
    names = {}
    for name, value in (settings | (extra if isinstance(extra, dict) else {})).items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names[name] = text
    for name, number in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if number is not None:
            names.setdefault(name, tokenizer.library.id_to_token(number))
    if data.chat_template is not None:
        file = pathlib.Path(data.chat_template).expanduser()
        if not file.is_file():
            raise UserError(f"data.chat_template: no file {file}")
        return ChatTemplate(file.read_text(encoding="utf-8"), names, str(file))
    file = tokenizer.folder / "chat_template.jinja"
    if file.is_file():
        beside = tokenizer.folder / MORE_TEMPLATES / "tool_use.jinja"
        tool_source = beside.read_text(encoding="utf-8") if beside.is_file() else None
        return ChatTemplate(file.read_text(encoding="utf-8"), names, str(file), tool_source)
    source, tool_source = settings.get("chat_template"), None
    if isinstance(source, list):  # several, by name
        by_name = {entry.get("name"): entry["template"] for entry in source}
        source, tool_source = by_name.get("default"), by_name.get("tool_use")
    if source is None:
        return None
    return ChatTemplate(source, names, f"{tokenizer.folder / 'tokenizer_config.json'} (chat_template)", tool_source)


def make_chat_renderer(tokenizer, data):
    """The renderer of conversations: by template, or by mistral-common for a tokenizer.model that comes without one."""
    template = find_template(tokenizer, data)
    if template is not None:
        return ChatRenderer(tokenizer, data, template)
    if not (tokenizer.folder / "tokenizer.json").is_file():
        return MistralRenderer(tokenizer, data)
    raise UserError(
        f"data.chat_template: the tokenizer in {tokenizer.folder} has no chat template (chat_template.jinja, or "
        "chat_template in its tokenizer_config.json); name a Jinja file"
    )


@dataclasses.dataclass
class _Conversation:
    """One rendered conversation. text: what the model sees. marked: the same with the template's special tokens renamed,
    or None when no content spells one. controls: where the template wrote special tokens, ascending. spans: what is
    trained, in characters."""

    text: str
    marked: str | None
    controls: list
    spans: list = dataclasses.field(default_factory=list)


class _ConversationRenderer(Renderer):
    """What the two renderers of conversations share: whose turns are trained, and how they begin. Records are as
    formats.Records gives them."""

    writes_bos_again = False  # whether the BOS token also begins later turns, so that the first is no mark to take away

    def __init__(self, tokenizer, data):
        super().__init__(tokenizer, data, adds_eos=False)
        self.train_on = list(dict.fromkeys(data.train_on or ["assistant"]))

    def __call__(self, records):
        records = list(records)
        out, ready = [EMPTY] * len(records), []
        for number, (record, where) in enumerate(records):
            # templates would write "None" for a content that is null
            messages = [{key: value for key, value in m.items() if value is not None} for m in record["messages"]]
            weights = [message.pop("weight", None) for message in messages]
            try:
                self._check(messages)
                trains = self._which_are_trained(messages, weights)
                ready.append((number, where, self._prepare(messages, record.get("tools") or None, trains)))
            except BadRecord as error:
                self._bad(where, f"{error} (roles: {_roles(messages)})")
        for (number, where, _), encoded in zip(ready, self._encode([item for *_, item in ready]), strict=True):
            if isinstance(encoded, BadRecord):
                self._bad(where, f"{encoded} (roles: {_roles(records[number][0]['messages'])})")
            else:
                out[number] = self._finish(*self._one_bos(*encoded), where)
        return out

    def _one_bos(self, tokens, trained):
        """Exactly one BOS at the beginning, whoever wrote it; none if data.add_bos is false, unless it is the first turn's
        own."""
        bos, given = self.tokenizer.bos_id, 0
        if bos is None:
            return tokens, trained
        while given < len(tokens) and tokens[given] == bos:
            given += 1
        kept = given and (self.data.add_bos is not False or self.writes_bos_again)
        begin = [bos] if kept or len(self.begin) else []
        tokens = np.concatenate([np.array(begin, np.int32), tokens[given:]])
        return tokens, np.concatenate([np.zeros(len(begin), bool), trained[given:]])

    def _check(self, messages):
        """BadRecord for messages, each as the reader lets it through, that cannot be rendered here."""
        if not any(message["role"] in self.train_on for message in messages):
            raise BadRecord(f"no message of a role that is trained ({', '.join(self.train_on)})")
        if any(MARKS.search(text) for text in strings_of(messages)):
            raise BadRecord("it holds private-use characters from U+10FFF0 on, which mark places here")

    def _which_are_trained(self, messages, weights):
        """bool of each message. weights: what the messages say of themselves, 0, 1 or None; see formats.Records."""
        for number, (message, weight) in enumerate(zip(messages, weights, strict=True), start=1):
            if weight and message["role"] not in self.train_on:
                raise BadRecord(
                    f"message {number} says that it is trained, but its role {message['role']!r} is not in data.train_on "
                    f"({', '.join(self.train_on)})"
                )
        trains = [m["role"] in self.train_on and w != 0 for m, w in zip(messages, weights, strict=True)]
        if not any(trains):
            raise BadRecord("every message of a role that is trained says that it is not (weight, train or training)")
        return trains


def _roles(messages):
    roles = [message["role"] for message in messages]
    return ", ".join(roles if len(roles) <= 12 else [*roles[:12], f"... {len(roles)} in all"])


def _control_ids(added, source):
    """{text: id} of the tokens that only the template may write, out of a tokenizer's added ones: those that it calls
    special, and others that the template names.

    Not `<think>` and `</think>`, nor another such pair that is not called special: contents hold them too, and there the
    model's own tokenizer reads them as tokens. Both are always treated alike, whichever of them the template names.
    """
    plain = {token.content for token in added.values() if not token.special}
    tags = {text: {f"<{text.strip('</>')}>", f"</{text.strip('</>')}>"} for text in plain}
    paired = {text for text, pair in tags.items() if text in pair and pair <= plain}
    return {
        token.content: number
        for number, token in added.items()
        if token.special or (token.content in source and token.content not in paired)
    }


class ChatRenderer(_ConversationRenderer):
    """Conversations, rendered with a ChatTemplate."""

    def __init__(self, tokenizer, data, template):
        super().__init__(tokenizer, data)
        self.template = template
        added = tokenizer.library.get_added_tokens_decoder()
        self.control_ids = _control_ids(added, "".join(template.sources))
        # What may end a turn: a token that is called special. (A `</tool_call>` of the template's ends no turn.)
        self.special = {token.content for token in added.values() if token.special} | {template.names.get("eos_token")}
        self._places = {name: place for place, name in enumerate(sorted(self.control_ids))}
        self.controls = control_pattern(self.control_ids)
        self._hints = sorted({text[:2] for text in self.control_ids})
        self.fingerprint = self._fingerprint(
            *template.sources, template.names, self.train_on, data.add_bos, data.on_long, data.on_bad, data.seq_len
        )
        if data.add_bos is False and tokenizer.bos_id is not None:
            turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
            bos = tokenizer.library.id_to_token(tokenizer.bos_id)
            self.writes_bos_again = bos in (self._render_or_none(turns, None) or "").removeprefix(bos)

    # ------------------------------------------------------------------------------------------------ text and spans

    def _prepare(self, messages, tools, trains):
        text, tagged = self.template.render(messages, tools)
        if tools and text == self._render_or_none(messages, None, like=tools):
            raise BadRecord(
                f"it has tools, but the chat template {self.template.where} writes nothing of them; take them away, or name "
                "a template for tools in data.chat_template"
            )
        conversation = self._told_apart(text, messages, tools)
        if self.template.has_generation_tags(tools) and self.train_on == ["assistant"]:
            conversation.spans = self._tagged_spans(conversation, messages, tools, tagged, trains)
        else:
            conversation.spans = [
                self._span(conversation, messages, tools, number) for number in range(len(messages)) if trains[number]
            ]
            ends = [0, *(end for _, end in conversation.spans)]
            if any(begin < end for (begin, _), end in zip(conversation.spans, ends, strict=False)):
                raise BadRecord(self._lacking("the turns overlap in the text"))
        return conversation

    def _told_apart(self, text, messages, tools):
        """Which special tokens of the text the template wrote, and which the contents only spell."""
        found = any(hint in part for part in strings_of([messages, tools]) for hint in self._hints)
        spelled = found and [word for part in strings_of([messages, tools]) for word in self.controls.findall(part)]
        if not spelled:
            return _Conversation(text, None, [match.span() for match in self.controls.finditer(text)])
        self.escaped.update(spelled)
        marked, _ = self.template.render(self._mark(messages), self._mark(tools))
        whole = re.compile(f"{TEXT_BEGIN}(?:{self.controls.pattern}){TEXT_END}|[{TEXT_BEGIN}{TEXT_END}]")
        controls, renamed, length, place = [], [], 0, 0
        for match in [*whole.finditer(marked), None]:
            between = marked[place : match.start() if match else len(marked)]
            last = 0
            for control in self.controls.finditer(between):
                controls.append((length + control.start(), length + control.end()))
                renamed += [between[last : control.start()], self._rename(control.group())]
                last = control.end()
            renamed.append(between[last:])
            length += len(between)
            if match:
                inner = match.group().strip(TEXT_BEGIN + TEXT_END)
                renamed.append(inner)
                length += len(inner)
                place = match.end()
        if MARKS.sub("", marked) != text:
            raise BadRecord("the chat template changes text that spells a special token, so it cannot be kept as text")
        return _Conversation(text, "".join(renamed), controls)

    def _mark(self, value):
        if isinstance(value, str):
            return self.controls.sub(lambda match: TEXT_BEGIN + match.group() + TEXT_END, value)
        if isinstance(value, dict):
            return {name: self._mark(item) for name, item in value.items()}
        return [self._mark(item) for item in value] if isinstance(value, list) else value

    def _tagged_spans(self, conversation, messages, tools, tagged, trains):
        """The parts inside generation tags, each with its end token even if the tags leave that out; of the turns that are
        trained."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        owners = self._owners(conversation.text, messages, tools, tagged, turns, trains)
        filled = {owner for owner, (begin, end) in zip(owners, tagged, strict=True) if begin < end}
        # tags around nothing: an empty answer, of which the end token is trained, or a part that a turn does without
        tagged = [
            (begin, end)
            for owner, (begin, end) in zip(owners, tagged, strict=True)
            if trains[owner] and (begin < end or owner not in filled)
        ]
        controls, spans = {end: conversation.text[begin:end] for begin, end in conversation.controls}, []
        begins, asked_on = {begin for begin, _ in tagged}, False
        ends = self._ends(self._render_or_none(messages[: turns[-1] + 1], tools))
        for begin, end in tagged:
            written = conversation.text[begin:end].rstrip()
            last = controls.get(begin + len(written)) if written else None
            if begin < end and end in begins:  # the turn's next part follows at once
                spans.append((begin, end))
                continue
            if last not in ends and not asked_on:
                ends, asked_on = ends | self._ends(self._before_question(messages, tools, turns[-1])), True
            spans.append((begin, end if last in ends else self._end_token(conversation, end, ends)))
        return spans

    def _owners(self, text, messages, tools, tagged, turns, trains):
        """The number of the assistant turn that each tagged part belongs to; every turn must have one.

        A part that is a turn's content tells that by itself, unless another turn says the same. Otherwise the conversation
        is rendered with a stand-in for every content. Turns without any (tool calls alone) have, in order, the parts
        between those of their neighbours.
        """
        contents = [messages[number].get("content") for number in turns]
        plain = [content.strip() if isinstance(content, str) else "" for content in contents]
        if len(tagged) == len(turns) and all(plain) and len(set(plain)) == len(plain):
            parts = [text[begin:end].strip() for begin, end in tagged]
            ends = {"", *self.special}
            if all(part.startswith(c) and part[len(c) :].strip() in ends for part, c in zip(parts, plain, strict=True)):
                return turns
        standins, changed = {}, list(messages)
        for number, content in zip(turns, plain, strict=True):
            if content or not messages[number].get("tool_calls"):
                standins[number] = f"{CONTENT}{number}{CONTENT_END}"
                changed[number] = messages[number] | {"content": standins[number]}
        other, parts = self.template.render(changed, tools)
        owners = []
        for begin, end in parts:
            found = [number for number, standin in standins.items() if standin in other[begin:end]]
            if len(found) > 1:
                raise BadRecord(self._untold(f"one part holds the messages {', '.join(str(n + 1) for n in found)}"))
            owners.append(found[0] if found else None)
        if len(parts) != len(tagged):
            raise BadRecord(self._untold(f"{len(tagged)} parts become {len(parts)} when other contents stand there"))
        if lost := [number for number in standins if number not in owners]:
            raise BadRecord(self._untold(f"no part holds message {lost[0] + 1}"))
        known = [owner for owner in owners if owner is not None]
        if known != sorted(known):
            raise BadRecord(self._untold("the parts have another order than the messages"))
        return self._shared_out(owners, tagged, turns, standins, trains)

    def _shared_out(self, owners, tagged, turns, standins, trains):
        """`owners` with a turn for the parts that have None: between two that are known, one for each turn without a
        content, and what is left for the turn before. Which is whose must not matter where there are more parts than
        turns: all of these turns are trained, or none."""
        out, place, before = list(owners), 0, None
        known = [(place, owner) for place, owner in enumerate(owners) if owner is not None]
        for stop, owner in [*known, (len(owners), None)]:
            last = turns[-1] + 1 if owner is None else owner
            waiting = [n for n in turns if (-1 if before is None else before) < n < last and n not in standins]
            free = [n for n in range(place, stop) if tagged[n][0] < tagged[n][1]]
            ahead = before if before is not None else waiting[0] if waiting else owner
            if len(free) < len(waiting):
                raise BadRecord(self._untold(f"{len(free)} parts stand for the {len(waiting)} turns without a content"))
            if len(free) > len(waiting) and len({trains[n] for n in (ahead, *waiting)}) > 1:
                raise BadRecord(self._untold(f"{len(free)} parts stand between two of which one is not trained"))
            out[place:stop] = [ahead] * (stop - place)
            for n, turn in zip(free[len(free) - len(waiting) :], waiting, strict=True):
                out[n] = turn
            place, before = stop + 1, before if owner is None else owner
        return out

    def _untold(self, what):
        return (
            f"the generation tags of the chat template {self.template.where} do not say of every assistant turn what is trained "
            f"of it: {what}"
        )

    def _span(self, conversation, messages, tools, number):
        """(begin, end) in the text of what is trained of one message: from where the model is asked to go on, to the end
        token; what beginnings of the conversation do not tell of that, stand-ins do."""
        text, message = conversation.text, messages[number]
        begin = end = None
        if message["role"] == "assistant":
            asked = self._render_or_none(messages[:number], tools, add_generation_prompt=True)
            if asked is not None and text.startswith(asked):
                content = message.get("content")
                content = content.strip() if isinstance(content, str) else ""
                # If the answer does not follow, then what does is a part of it only if the template writes the prompt.
                if (content and text[len(asked) :].lstrip().startswith(content)) or asked != self._render_or_none(
                    messages[:number], tools
                ):
                    begin = len(asked)
        answered = self._render_or_none(messages[: number + 1], tools)
        if answered is not None and text.startswith(answered):
            end = self._end_before(conversation, begin or 0, len(answered))
            if end is None:
                raise BadRecord(self._lacking(NO_END))
        elif begin is not None:
            before = self._before_question(messages, tools, number)
            if before is not None and text.startswith(before):
                end = self._end_before(conversation, begin, len(before))
        if begin is None or end is None:
            first, last = self._content_place(text, messages, tools, number)
            begin = first if begin is None else begin
            end = self._end_token(conversation, last, self._ends(answered)) if end is None else end
        return begin, end

    def _end_before(self, conversation, begin, place):
        """Where the end token ends that is the last thing but white space before a place of the text, and behind `begin`;
        None if something else is."""
        last = bisect.bisect_right(conversation.controls, (place, place)) - 1
        start, stop = conversation.controls[last] if last >= 0 else (0, 0)
        ends_there = stop > begin and not conversation.text[stop:place].strip()
        return stop if ends_there and conversation.text[start:stop] in self.special else None

    def _before_question(self, messages, tools, number):
        """The conversation up to a message as it is where the model is asked to go on, without what asks it; None if that
        cannot be told. Some templates end a conversation otherwise: Phi-3's with an EOS behind the last turn's end token,
        gpt-oss's with another token in its place."""
        asked = self._render_or_none(messages[:number], tools, add_generation_prompt=True) or ""
        unasked = self._render_or_none(messages[:number], tools) or ""
        same = len(os.path.commonprefix([asked, unasked]))  # noqa: RUF071  character by character is wanted
        for control in self.controls.finditer(asked):  # two different tokens may be spelled alike at their beginnings
            same = control.start() if control.start() < same < control.end() else same
        question = asked[same:]
        asked_on = self._render_or_none(messages[: number + 1], tools, add_generation_prompt=True) or ""
        return asked_on.removesuffix(question) if question and asked_on.endswith(question) else None

    def _render_or_none(self, messages, tools, **options):
        try:
            return self.template.render(messages, tools, **options)[0]
        except BadRecord:  # it insists on whole conversations
            return None

    def _ends(self, answered):
        """The texts of what may end a turn: the EOS, and the special token that ends `answered`, a conversation up to one;
        None: it cannot be rendered."""
        written = (answered or "").rstrip()
        closing = next((name for name in self.control_ids if name in self.special and written.endswith(name)), None)
        return {closing, self.template.names.get("eos_token")} - {None}

    def _end_token(self, conversation, place, ends):
        """Where the end token, one of `ends`, ends that follows a turn's text."""
        text = conversation.text
        begin = place + len(text[place:]) - len(text[place:].lstrip())
        index = bisect.bisect_left(conversation.controls, (begin, begin))
        if index < len(conversation.controls) and conversation.controls[index][0] == begin:
            end = conversation.controls[index][1]
            if text[begin:end] in ends:
                return end
        raise BadRecord(self._lacking(NO_END))

    def _content_place(self, text, messages, tools, number):
        """(begin, end) of a message's content, found by a rendering in which a stand-in takes its place."""
        content = messages[number].get("content")
        standin = f"{CONTENT}{number}{CONTENT_END}"
        if isinstance(content, str) and content.strip():
            changed = [*messages[:number], messages[number] | {"content": standin}, *messages[number + 1 :]]
            parts = (self._render_or_none(changed, tools) or "").split(standin)
            if len(parts) == 2:
                head, tail = parts
                for written in (content, content.strip(), content.lstrip(), content.rstrip()):
                    if text == head + written + tail:
                        return len(head), len(head) + len(written)
        raise BadRecord(
            self._lacking(
                f"the text of message {number + 1} cannot be told from what stands around it, neither by rendering the "
                "conversation up to there nor with a stand-in"
            )
        )

    def _lacking(self, what):
        return (
            f"what is trained cannot be found in the rendering of the chat template {self.template.where}: {what}. "
            "Generation tags ({% generation %} ... {% endgeneration %}) around what the assistant writes, end token "
            "included, would say it; data.chat_template names a template of your own"
        )

    # ------------------------------------------------------------------------------------------------------- tokens

    @functools.cached_property
    def _plain(self):
        """The tokenizer with special tokens read from the text. Without its post-processor, which may take the space that a
        token begins with (Llama 3's does) out of the place that it gives for it."""
        library = type(self.tokenizer.library).from_str(self.tokenizer.library.to_str())
        library.post_processor = None
        return library

    @functools.cached_property
    def _renamed(self):
        """(library, ids): the tokenizer with its control tokens spelled in private-use characters, so that text cannot
        spell them, and i32[n], what its ids are called in the real one."""
        settings = json.loads(self.tokenizer.library.to_str())
        real, settings["post_processor"] = {}, None
        for token in settings["added_tokens"]:
            name = token["content"]
            if name in self.control_ids:
                token["content"] = self._rename(name)
            real[token["content"]] = token["id"]
        library = type(self.tokenizer.library).from_str(json.dumps(settings))
        ids = np.arange(max(library.get_vocab(with_added_tokens=True).values()) + 1, dtype=np.int32)
        for name, number in real.items():
            ids[library.token_to_id(name)] = number
        return library, ids

    def _rename(self, control):
        """As long as the control token itself, so that places in the text stay the same."""
        return chr(RENAMED + self._places[control]) * len(control)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("_plain", "_renamed")}

    def _encode(self, conversations):
        texts = [conversation.text for conversation in conversations if conversation.marked is None]
        plain = iter(self._plain.encode_batch(texts, add_special_tokens=False))
        return [
            self._encoded(next(plain), conversation)
            if conversation.marked is None
            else self._encoded(None, conversation)
            for conversation in conversations
        ]

    def _encoded(self, encoding, conversation):
        """(tokens i32[n], trained bool[n]) of a conversation, or a BadRecord."""
        library, names = (self._plain, None) if conversation.marked is None else self._renamed
        text = conversation.marked or conversation.text
        if encoding is None:
            encoding = library.encode(text, add_special_tokens=False)
        tokens, places = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        begins = np.array([begin for begin, _ in conversation.spans])
        across = ((places[:, 0] < begins[:, None]) & (begins[:, None] < places[:, 1])).any(1)
        if across.any():
            tokens, places = self._cut(library, text, begins[across].tolist())
        trained = np.zeros(len(tokens), bool)
        for begin, end in conversation.spans:
            trained |= (places[:, 0] < end) & (places[:, 1] > begin)
        if names is not None:
            tokens = names[tokens]
            written = np.isin(tokens, list(self.control_ids.values())).sum()
            if written != len(conversation.controls):
                return BadRecord("text in it spells a special token in a way that the tokenizer cannot keep as text")
        return tokens, trained

    def _cut(self, library, text, cuts):
        """(tokens, places) of a text whose parts between the cuts are encoded each for itself."""
        tokens, places = [], []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            part, shift, drop = text[begin:end], begin, 0
            encoding = library.encode(part, add_special_tokens=False)
            if begin and not self.tokenizer.starts_plainly:  # without the space that it puts before a text
                newline = library.encode("\n", add_special_tokens=False).ids
                after = library.encode("\n" + part, add_special_tokens=False)
                if after.ids[: len(newline)] == newline:
                    encoding, shift, drop = after, begin - 1, len(newline)
            tokens += encoding.ids[drop:]
            places += [(first + shift, last + shift) for first, last in encoding.offsets[drop:]]
        return np.array(tokens, np.int32), np.array(places, np.int64).reshape(-1, 2)


class MistralRenderer(_ConversationRenderer):
    """Conversations as mistral-common encodes them, for a tokenizer.model that comes without a chat template."""

    def __init__(self, tokenizer, data):
        super().__init__(tokenizer, data)
        if self.train_on != ["assistant"]:
            raise UserError(
                f"data.train_on: without a chat template only assistant turns can be trained, got {self.train_on}; name "
                "a Jinja file in data.chat_template"
            )
        self._mistral  # noqa: B018  what is missing is told now
        self.fingerprint = self._fingerprint(self.train_on, data.add_bos, data.on_long, data.on_bad, data.seq_len)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_mistral"}

    @functools.cached_property
    def _mistral(self):
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise UserError(
                f"data.chat_template: the tokenizer in {self.tokenizer.folder} has no chat template, and without one "
                f"the package mistral-common[sentencepiece] is needed ({error}); install it or name a Jinja file"
            ) from None
        return MistralTokenizer.from_file(str(self.tokenizer.file), mode=ValidationMode.finetuning)

    def _prepare(self, messages, tools, trains):
        """(tokens, trained): every answer's tokens, as the tokenizer gives them, must stand before its EOS."""
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if tools or any(not isinstance(message.get("content"), str) for message in messages):
            raise BadRecord("tools and contents that are no strings need a chat template (data.chat_template)")
        for message in messages:
            self._count_escaped(message["content"])
        plain = [{name: message[name] for name in ("role", "content")} for message in messages]
        try:
            tokens = self._mistral.encode_chat_completion(ChatCompletionRequest(messages=plain)).tokens
        except (MistralCommonException, ValueError) as error:
            raise BadRecord(f"mistral-common complains: {error}") from None
        tokens = np.array(tokens, np.int32)
        ends = np.flatnonzero(tokens == self.tokenizer.eos_id)
        answers = [
            (message["content"], wanted)
            for message, wanted in zip(plain, trains, strict=True)
            if message["role"] == "assistant"
        ]
        trained = np.zeros(len(tokens), bool)
        if len(ends) == len(answers):
            for end, (answer, wanted) in zip(ends, answers, strict=True):
                ids = self._mistral.instruct_tokenizer.tokenizer.encode(answer, bos=False, eos=True)
                begin = end + 1 - len(ids)
                if begin > 0 and tokens[begin : end + 1].tolist() == ids:
                    trained[begin : end + 1] = wanted
                else:
                    break
            else:
                return tokens, trained
        raise BadRecord("the answers cannot be found in what mistral-common makes of it; name a data.chat_template")

    def _encode(self, prepared):
        return prepared
