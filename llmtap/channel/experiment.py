"""A/B experiments: options (`[experiment]`), assignment of requests to arms, and the on/off switch word.

`resolve` turns the options into the Experiment that all processes get. Relays assign requests with an
`Assigner`; the meter compares the arms (`meter/experiments.py`). A control word, which the meter sends on the
channel's socket among the acknowledgements, turns a running experiment on or off.

A keyed hash (BLAKE2b, RFC 7693) of the experiment's name and the unit (request, conversation or tenant) gives
128 bits. The upper half, as a number in [0, 1), selects the arm by the cumulated weights. The lower half is
the unit's public id, which reveals neither the unit nor its arm. With the key, an arm can be computed again.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b
from itertools import accumulate
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Struct

from llmtap.channel.frames import CONTROL
from llmtap.errors import ConfigError
from llmtap.exchange.label import LABEL_FIELD
from llmtap.json_types import JsonObject
from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Bytes, Duration, encode_special, parse_duration_ns

ARMS_MAX: Final = 8
"""Maximum number of arms: each has its own histograms in the meter, and each comparison reduces the certainty
of the others."""
ALPHA_MAX: Final = 0.5
NO_ROOM: Final = "no_room"
"""Reason for an exclusion: the memory limit `held_bytes` was reached, so the relay did not apply the arm."""
OWN_HEADER: Final = "own_header"
"""Reason for an exclusion: the client itself sent a header field of another arm, and the relay did not remove
it."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WORSE: Final = re.compile(
    rf"({'|'.join(metric.name for metric in shown_on(Surface.EXPERIMENT))})(\.p(50|95|99))?"
    r"|refused|failed|cancelled|false_positives|false_negatives"
)
_FIELD: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING: Final = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        LABEL_FIELD.decode(),
    }
)
"""Header fields that an arm must not set: framing, routing, and the label, which the relay removes anyway."""
_HEADER_KEYS: Final = ("conversation_headers", "tenant_headers")
_ON: Final = 1 << 62
_ID_MAX: Final = 0xFFFF_FFFF
_SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%")
STAGES_MAX: Final = 8
"""Maximum number of stages of a ramp: alpha is divided by their number, so each stage reduces the power."""


class Arm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One side of an experiment. At most one of `upstream`, `headers` and `body` is set, and none for an arm
    that changes nothing."""

    name: str
    weight: float = 1.0
    """Share of the units that get the arm, relative to the other arms."""
    upstream: str | None = None
    headers: dict[str, str] = {}
    """Request header fields to set: fields of the same name are replaced."""
    body: JsonObject = {}
    """Top-level fields of the JSON request body to set; other fields keep their bytes."""

    @property
    def changes(self) -> dict[str, object]:
        """The change that the arm makes, without the values of headers and fields, which can be secrets."""
        if self.upstream is not None:
            return {"upstream": self.upstream}
        if self.headers:
            return {"headers": sorted(self.headers)}
        return {"body": sorted(self.body)} if self.body else {}

    @property
    def route(self) -> str | None:
        """Text of the change for `Exchange.route`; None if nothing is changed."""
        if self.upstream is not None:
            return f"upstream {self.upstream}"
        for part, fields in (("headers", self.headers), ("body", self.body)):
            if fields:
                return f"{part} {','.join(sorted(fields))}"
        return None


class ExperimentOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[experiment]` table. Raises ConfigError, which names the option with an invalid value."""

    enabled: Annotated[
        bool, opt("Whether arms are assigned from the start; the admin API can change it.")
    ] = False
    name: Annotated[str, opt("Name of the experiment; a new name assigns all units again.")] = "experiment"
    until: Annotated[
        str | None, opt("End of the experiment: RFC 3339 date, or a duration from the start (`24h`).")
    ] = None
    unit: Annotated[
        Literal["request", "conversation", "tenant"],
        opt("Unit of assignment; all requests of a unit get the same arm."),
    ] = "request"
    key: Annotated[
        str | None, opt("Key of the assignment hash; default: random, so assignments change at a restart.")
    ] = None
    aa: Annotated[bool, opt("A/A mode: arms are assigned and compared, but requests are not changed.")] = (
        False
    )
    control: Annotated[
        str | None, opt("Arm that the others are compared with (default: the first arm without a change).")
    ] = None
    arms: Annotated[list[Arm], opt("Tables of name, weight and one of upstream, headers or body.")] = []
    conversation_headers: Annotated[
        tuple[str, ...], opt("Request headers with the conversation ID; the first one present is used.")
    ] = ("x-session-id", "x-conversation-id", "x-litellm-session-id", "x-openwebui-chat-id")
    tenant_headers: Annotated[
        tuple[str, ...], opt("Request headers that identify the tenant; only their hash is stored.")
    ] = ("authorization", "x-api-key", "api-key")
    body_bytes: Annotated[
        Bytes,
        opt(
            "Maximum size of a request body that is buffered to be "
            "read or changed; longer bodies pass unmodified."
        ),
    ] = Bytes(1 << 20)
    held_bytes: Annotated[
        Bytes,
        opt(
            "Maximum memory of each relay for buffered request bodies; requests "
            "above it are forwarded as in the control arm and excluded."
        ),
    ] = Bytes(64 << 20)
    alpha: Annotated[
        float, opt("Probability of a false positive over all looks; the confidence level is 1 - alpha.")
    ] = 0.05
    covariate: Annotated[
        Literal["none", "request_bytes"],
        opt(
            "Covariate that adjusts differences of means; `request_bytes`: size of the unit's "
            "first request, which stands for the length of its prompt."
        ),
    ] = "none"
    stop_worse: Annotated[
        tuple[str, ...],
        opt(
            "Figures that end the experiment when an arm is worse than the control in one "
            "of them (`ttft`, `e2e.p95`, `failed`); `alpha` is the probability of a false stop."
        ),
    ] = ()
    schedule: Annotated[
        str | None,
        opt(
            "Ramp: shares of the changed arm, stage by stage (`1%, 10%, 50%`), in place of the "
            "weights. The next one begins if `stop_worse` found no arm worse. Needs `stop_worse`, two arms."
        ),
    ] = None
    stage_time: Annotated[Duration, opt("Minimum duration of a stage of `schedule`.")] = Duration(
        3_600 * NS_PER_S
    )
    strip_headers: Annotated[
        bool,
        opt(
            "Remove header fields that an arm sets from the requests of the other "
            "arms, also of the control, if clients send them; false: such requests are only counted."
        ),
    ] = False
    disclosure: Annotated[
        JsonObject, opt("Guardrails in use, copied into the result as required by IETF 4.8.1.")
    ] = {}

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                "experiment.name", f"{self.name!r} is not a valid name", "use only letters, digits and _ . -"
            )
        if not 0 < self.alpha <= ALPHA_MAX:
            raise ConfigError(
                "experiment.alpha",
                f"must be above 0 and at most {ALPHA_MAX:g}, got {self.alpha:g}",
                "such as 0.05",
            )
        for name in self.stop_worse:
            if _WORSE.fullmatch(name) is None:
                raise ConfigError(
                    "experiment.stop_worse",
                    f"there is no figure {name!r}",
                    "write a time such as ttft (its mean) or ttft.p95, or refused, failed, cancelled,"
                    " false_positives, false_negatives",
                )
        if self.key is not None and not self.key:
            raise ConfigError(
                "experiment.key",
                "is empty",
                "set a random key (openssl rand -hex 16), or leave out experiment.key",
            )
        for key in _HEADER_KEYS:
            for name in getattr(self, key):
                if _FIELD.fullmatch(name) is None:
                    problem = f"{name!r} is not a valid header name"
                    raise ConfigError(f"experiment.{key}", problem, "use letters, digits and -")
        if self.until is not None:
            _end_wall_ns(self.until, 0)  # raises ConfigError if the text is invalid
        if self.schedule is not None:
            _parse_schedule(self.schedule)
            if not self.stop_worse:
                raise ConfigError(
                    "experiment.schedule",
                    "needs experiment.stop_worse, which decides whether the next stage begins",
                    'such as stop_worse = ["ttft", "failed"]',
                )
        if self.arms:
            self._check_arms()

    def _check_arms(self) -> None:
        if not 2 <= len(self.arms) <= ARMS_MAX:
            raise ConfigError(
                "experiment.arms",
                f"expected 2 to {ARMS_MAX} arms, got {len(self.arms)}",
                "write a table [[experiment.arms]] for each arm",
            )
        if self.schedule is not None and len(self.arms) != 2:
            raise ConfigError(
                "experiment.schedule",
                f"needs exactly two arms, got {len(self.arms)}",
                "leave out experiment.schedule, and set the weights of the arms",
            )
        names = [arm.name for arm in self.arms]
        for i, arm in enumerate(self.arms):
            _check_arm(arm, f"experiment.arms[{i}]")
            if names.index(arm.name) < i:
                raise ConfigError(
                    f"experiment.arms[{i}].name",
                    f"an earlier arm has the same name, {arm.name!r}",
                    "give each arm a name of its own",
                )
        changing = [arm.name for arm in self.arms if arm.changes]
        if not self.aa:
            if not changing:
                raise ConfigError(
                    "experiment.arms",
                    "no arm changes requests",
                    "set upstream, headers or body of an arm, or for an A/A test experiment.aa = true",
                )
            if len(changing) == len(self.arms):
                raise ConfigError(
                    "experiment.arms",
                    "every arm changes requests, but one must be the control, which changes nothing",
                    "add an arm that has only a name and a weight",
                )
        if self.control is not None and self.control not in names:
            raise ConfigError(
                "experiment.control", f"there is no arm {self.control!r}", f"the arms are {', '.join(names)}"
            )
        if self.control in changing and not self.aa:
            raise ConfigError(
                "experiment.control",
                f"the arm {self.control!r} changes requests, but the control must change nothing",
                "name an arm without upstream, headers and body",
            )


def _check_arm(arm: Arm, place: str) -> None:
    if _NAME.fullmatch(arm.name) is None:
        raise ConfigError(
            f"{place}.name", f"{arm.name!r} is not a valid name", "use only letters, digits and _ . -"
        )
    if not 0 < arm.weight < float("inf"):
        raise ConfigError(
            f"{place}.weight",
            f"expected a finite number above 0, got {arm.weight:g}",
            "to send no requests to an arm, leave the arm out",
        )
    changes = [what for what in ("upstream", "headers", "body") if getattr(arm, what) not in (None, {})]
    if len(changes) > 1:
        problem = (
            f"the arm {arm.name!r} changes {' and '.join(changes)}, but an arm can change only one of them"
        )
        raise ConfigError(place, problem, "set only one of upstream, headers and body")
    for name, value in arm.headers.items():
        if _FIELD.fullmatch(name) is None:
            raise ConfigError(
                f"{place}.headers", f"{name!r} is not a valid header name", "use letters, digits and -"
            )
        if name.lower() in _FRAMING:
            raise ConfigError(
                f"{place}.headers",
                f"an arm cannot set {name!r}: the relay or the HTTP protocol decides this field",
                "leave out this header",
            )
        if _VALUE.fullmatch(value) is None or value != value.strip():
            raise ConfigError(
                f"{place}.headers",
                f"the value of {name!r} is not a valid header value",
                "use visible Latin-1 characters, with blanks and tabs only between them",
            )
    try:
        # Find values that the encoder would replace by null (nan, inf), or cannot encode.
        if msgspec.json.decode(msgspec.json.encode(arm.body)) != msgspec.to_builtins(arm.body):
            raise ValueError("JSON cannot express the numbers nan and inf")
    except (ValueError, TypeError) as exc:
        raise ConfigError(
            f"{place}.body", f"cannot be written as JSON: {exc}", "use only values of JSON"
        ) from None


class Experiment(ExperimentOptions, frozen=True, kw_only=True):
    """The experiment as all processes get it. `key` is None in processes that do not assign requests."""

    id: int
    """32 bits that identify one configuration of an experiment."""
    control: str
    until_wall_ns: int | None
    """End of the experiment, in ns since 1970; None: no end."""
    key_fingerprint: str
    """Hash that shows whether two experiments have the same key, without revealing the key."""

    def has_ended(self, wall_ns: int) -> bool:
        """Return whether the experiment's end is reached at this wall time."""
        return self.until_wall_ns is not None and wall_ns >= self.until_wall_ns

    def without_key(self) -> "Experiment":
        """Return a copy for processes that do not assign requests, so that they do not get the secret key."""
        return msgspec.structs.replace(self, key=None)

    @property
    def stages(self) -> tuple[float, ...]:
        """Share of the arm that is not the control, for each stage; empty without a schedule."""
        return () if self.schedule is None else _parse_schedule(self.schedule)

    def at_stage(self, stage: int) -> "Experiment":
        """Return the experiment with the weights and the id of a stage, counted from 0."""
        if not self.stages:
            return self
        share = self.stages[stage]
        arms = [
            msgspec.structs.replace(arm, weight=1 - share if arm.name == self.control else share)
            for arm in self.arms
        ]
        return msgspec.structs.replace(self, arms=arms, id=(self.id + stage) & _ID_MAX)

    def stage_of(self, experiment_id: int) -> int | None:
        """Return the stage with this id (0 without a schedule); None if the id is of another experiment."""
        stage = (experiment_id - self.id) & _ID_MAX
        return stage if stage < max(1, len(self.stages)) else None

    @property
    def shares(self) -> dict[str, float]:
        """Expected share of units by arm."""
        total = sum(arm.weight for arm in self.arms)
        return {arm.name: arm.weight / total for arm in self.arms}


def resolve(options: ExperimentOptions, spare_key: str, start_wall_ns: int) -> Experiment | None:
    """Return the experiment that the options describe, or None if they name no arms.

    `spare_key`: used if the options have no key. A duration in `until` counts from `start_wall_ns`.
    """
    if not options.arms:
        return None
    key = spare_key if options.key is None else options.key
    control = options.control
    if control is None:
        control = next(arm.name for arm in options.arms if options.aa or not arm.changes)
    until_ns = None if options.until is None else _end_wall_ns(options.until, start_wall_ns)
    configuration = msgspec.json.encode([options, key, until_ns], enc_hook=encode_special, order="sorted")
    resolved = {name: getattr(options, name) for name in options.__struct_fields__} | {
        name: tuple(header.lower() for header in getattr(options, name)) for name in _HEADER_KEYS
    }
    return Experiment(
        **resolved | {"key": key, "control": control},
        id=int.from_bytes(blake2b(configuration, digest_size=4).digest()),
        until_wall_ns=until_ns,
        key_fingerprint=blake2b(key.encode(), digest_size=6, person=b"fingerprint").hexdigest(),
    )


def _parse_schedule(text: str) -> tuple[float, ...]:
    """Return the shares in a schedule: 0.01, 0.1 and 0.5 for `1%, 10%, 50%`. Raises ConfigError."""
    shares = []
    for part in text.split(","):
        m = _SHARE.fullmatch(part.strip())
        share = float(m[1]) / 100 if m else 0.0
        if not 0 < share < 1:
            raise ConfigError(
                "experiment.schedule",
                f"{part.strip()!r} is not a share between 0 % and 100 %",
                "such as 1%, 10%, 50%",
            )
        shares.append(share)
    if sorted(set(shares)) != shares or len(shares) > STAGES_MAX:
        raise ConfigError(
            "experiment.schedule",
            f"expected at most {STAGES_MAX} shares, each above the previous one, got {text!r}",
            "such as 1%, 10%, 50%",
        )
    return tuple(shares)


def _end_wall_ns(until: str, start_wall_ns: int) -> int:
    """Return the end of the experiment as wall time in ns since 1970. Raises ConfigError."""
    try:
        return start_wall_ns + parse_duration_ns(until)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(until)
    except ValueError:
        date = None
    if date is None or date.tzinfo is None:
        raise ConfigError(
            "experiment.until",
            f"{until!r} is neither a duration nor a date with its time zone",
            "write 24h, or 2026-03-01T12:00:00Z",
        )
    return round(date.timestamp() * 1e9)


def switch_word(experiment_id: int, on: bool) -> int:
    """Return the control word that turns an experiment on or off."""
    return CONTROL | (_ON if on else 0) | experiment_id


def read_switch(word: int) -> tuple[int, bool]:
    """Return the id of the experiment in a control word, and whether the word turns the experiment on."""
    return word & _ID_MAX, bool(word & _ON)


_DIGEST_BYTES: Final = 16


class Assigner:
    """Assigns units (requests, conversations, tenants) to arms by their weights, which must be above 0."""

    __slots__ = ("_seed", "_upper_bounds")

    def __init__(self, key: str, name: str, weights: Sequence[float]) -> None:
        assert weights and min(weights) > 0
        # RFC 7693 2.1 allows keys of up to 64 bytes, so use a digest of the text as the key.
        secret = blake2b(key.encode()).digest()
        self._seed = blake2b(name.encode() + b"\0", digest_size=_DIGEST_BYTES, key=secret)
        """Start of the hash input, so that each experiment assigns units anew."""
        total = sum(weights)
        # Only the first 64 bits of the digest are used as the unit's hash, so the bounds have this scale. The
        # last arm has no bound: it gets all hashes above the other bounds, so that rounding leaves no gap.
        self._upper_bounds = [round(w / total * 2**64) for w in accumulate(weights)][:-1]
        """For each arm: hash below which a unit belongs to it or to an arm before it."""

    def assign(self, unit: bytes) -> tuple[int, str]:
        """Return the index of the unit's arm, and the unit's public id (16 hex digits)."""
        digest = self._seed.copy()
        digest.update(unit)
        raw = digest.digest()
        return bisect_right(self._upper_bounds, int.from_bytes(raw[:8])), raw[8:].hex()


def request_unit(relay: str, seq: int) -> bytes:
    """Return the unit of a request that is a unit of its own: relay and number, as in the exchange's `id`."""
    return f"{relay}-{seq}".encode()
