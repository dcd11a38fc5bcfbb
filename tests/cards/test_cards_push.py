"""Cards on the Hub, against a stand-in for it: what is committed where, and what each refusal is called."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_geosharp.cards import card
from hf_geosharp.cards.push import REMOVE_TITLE, TITLE, Hub, is_first_rank, may_write
from hf_geosharp.errors import CardError, HubError, UsageError
from tests.cards.results import make_result
from tests.hub_stand_in import HANG, Answer, StandIn

MINE, ORG, THEIRS = "me/small-bert", "lab/small-bert", "you/small-bert"
CARD = b"---\nlicense: mit # yes\n---\n\n# Title\n"
RESULT = make_result()


def edit(content: bytes | None) -> bytes:
    return card.merge(card.new(MINE) if content is None else content, RESULT, MINE)


def forget_connections() -> None:
    """The client decides when it first connects whether it may."""
    try:
        from huggingface_hub.utils import close_session as forget
    except ImportError:
        from huggingface_hub.utils import reset_sessions as forget  # before 1.0
    forget()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    from huggingface_hub import constants, file_download

    with StandIn() as stand_in:
        files = stand_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        # Before 1.0 the client holds it in both places.
        for module in (constants, file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
            monkeypatch.delenv(name, raising=False)
        forget_connections()
        for repo in (MINE, ORG, THEIRS):
            stand_in.add(repo, CARD, **{"config.json": b"{}"})
        yield stand_in
        forget_connections()


def at(repo: str, **options: object) -> Hub:
    return Hub(repo, timeout=5.0, **options)  # type: ignore[arg-type]


def test_own_repositories_get_a_commit(hub: StandIn) -> None:
    done = at(MINE).push(edit)
    assert done.how == "commit"
    assert done.url == f"{hub.url}/{MINE}/commit/{hub.repos[MINE].heads['main']}"
    assert hub.repos[MINE].card() == edit(CARD)
    assert hub.messages == [TITLE]
    # The card and nothing else.
    assert hub.repos[MINE].commits[hub.repos[MINE].heads["main"]] == {"README.md": edit(CARD), "config.json": b"{}"}


def test_nothing_is_committed_if_nothing_changes(hub: StandIn) -> None:
    hub.add(MINE, edit(CARD))
    assert at(MINE).push(edit).how == "unchanged"
    assert hub.count("commit") == hub.count("preupload") == hub.count("whoami") == 0


def test_twice_is_once(hub: StandIn) -> None:
    assert [at(MINE).push(edit).how for _ in range(2)] == ["commit", "unchanged"]
    assert hub.count("commit") == 1


def test_a_repository_without_a_card_gets_one(hub: StandIn) -> None:
    hub.add(MINE, None)
    assert at(MINE).read().content is None
    assert at(MINE).push(edit).how == "commit"
    assert hub.repos[MINE].card() == edit(None)


def test_others_get_a_pull_request(hub: StandIn) -> None:
    done = at(THEIRS).push(edit)
    assert done.how == "pull request"
    assert done.url == f"{hub.url}/{THEIRS}/discussions/1"
    assert hub.repos[THEIRS].card() == CARD
    assert hub.repos[THEIRS].card("refs/pr/1") == edit(CARD)


def test_an_open_pull_request_is_updated_rather_than_doubled(hub: StandIn) -> None:
    at(THEIRS).push(edit)
    assert at(THEIRS).push(edit).how == "unchanged"
    newer = make_result(geodesic_sharpness=0.5)
    done = at(THEIRS).push(lambda content: card.merge(content or b"", newer, MINE))
    assert (done.how, done.url) == ("updated pull request", f"{hub.url}/{THEIRS}/discussions/1")
    assert len(hub.repos[THEIRS].requests) == 1
    assert b"value: 0.5" in (hub.repos[THEIRS].card("refs/pr/1") or b"")
    assert hub.repos[THEIRS].card() == CARD


def test_every_request_carries_the_token_that_was_given(hub: StandIn) -> None:
    for newer in (edit, lambda content: card.merge(content or b"", make_result(geodesic_sharpness=0.5), MINE)):
        at(THEIRS, token="hf_given").push(newer)
    assert {name for name, _ in hub.senders} > {"info", "resolve", "whoami", "discussions", "commit"}
    assert {sender for name, sender in hub.senders if name != "validate"} == {"Bearer hf_given"}


@pytest.mark.parametrize("change", [{"status": "closed"}, {"title": "Something else"}, {"author": {"name": "other"}}])
def test_other_pull_requests_are_left_alone(hub: StandIn, change: dict[str, object]) -> None:
    at(THEIRS).push(edit)
    hub.repos[THEIRS].requests[0].update(change)
    assert at(THEIRS).push(edit).how == "pull request"
    assert len(hub.repos[THEIRS].requests) == 2


@pytest.mark.parametrize(("role", "how"), [("admin", "commit"), ("write", "commit"), ("read", "pull request"),
                                           ("contributor", "pull request"), (None, "commit")])  # fmt: skip
def test_in_an_organisation_the_role_decides(hub: StandIn, role: str | None, how: str) -> None:
    hub.user["orgs"] = [{"name": "lab"} | ({"roleInOrg": role} if role else {})]
    assert at(ORG).push(edit).how == how


@pytest.mark.parametrize("endpoint", ["commit", "preupload"])
def test_where_writing_is_forbidden_after_all_a_pull_request_is_opened(hub: StandIn, endpoint: str) -> None:
    answered = []

    class Once(dict):  # type: ignore[type-arg]
        def get(self, name: str, default: object = None) -> object:
            if name == endpoint and not answered:
                answered.append(name)
                return Answer(403, message="Forbidden: you must have write access")
            return default

    hub.faults = Once()
    assert at(MINE).push(edit).how == "pull request"
    assert hub.repos[MINE].card() == CARD


def test_what_is_asked_for_is_done(hub: StandIn) -> None:
    assert at(MINE).push(edit, create_pr=True).how == "pull request"
    assert at(THEIRS).push(edit, create_pr=False).how == "commit"
    hub.faults["commit"] = Answer(403)
    with pytest.raises(HubError, match="neither write there"):
        at(MINE).push(edit, create_pr=False)


def test_another_branch(hub: StandIn) -> None:
    hub.repos[MINE].heads["dev"] = hub.repos[MINE].heads["main"]
    at(MINE, revision="dev").push(edit)
    assert (hub.repos[MINE].card("dev"), hub.repos[MINE].card()) == (edit(CARD), CARD)


def test_a_commit_is_no_place_to_push_to(hub: StandIn) -> None:
    with pytest.raises(UsageError, match="give a branch"):
        at(MINE, revision="0" * 40).push(edit)


def test_what_would_stop_a_push_is_known_before_a_score_is_taken(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    at(MINE).check_push()
    assert hub.log == ["whoami"]
    with pytest.raises(UsageError, match="nothing can be pushed to a commit"):
        at(MINE, revision="0" * 40).check_push()
    hub.faults["whoami"] = Answer(401)
    with pytest.raises(HubError, match="does not accept the token"):
        at(MINE).check_push()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="pushing needs a token"):
        at(MINE).check_push()
    monkeypatch.setenv("RANK", "1")
    at(MINE).check_push()


def test_removing_is_pushed_with_a_title_of_its_own(hub: StandIn) -> None:
    at(MINE).push(edit)
    at(MINE).push(lambda content: card.remove(content or b""), title=REMOVE_TITLE)
    assert hub.repos[MINE].card() == CARD
    assert hub.messages == [TITLE, REMOVE_TITLE]


def test_a_card_that_cannot_be_merged_is_not_pushed(hub: StandIn) -> None:
    hub.add(MINE, b"---\nlicense: [mit\n---\n")
    with pytest.raises(CardError, match="not valid YAML"):
        at(MINE).push(edit)
    assert hub.count("commit") == 0


@pytest.mark.parametrize("rank", ["1", "7"])
@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_only_rank_0_pushes(hub: StandIn, monkeypatch: pytest.MonkeyPatch, name: str, rank: str) -> None:
    monkeypatch.setenv(name, rank)
    assert at(MINE).push(edit).how == "not rank 0"
    assert hub.log == []
    monkeypatch.setenv(name, "0")
    assert is_first_rank()


REFUSALS = {
    "no such repository": ("info", Answer(404, "RepoNotFound"), "there is no such model, or it is private"),
    "anonymous": ("info", Answer(401, "RepoNotFound"), "there is no such model, or it is private"),
    "gated": ("info", Answer(403, "GatedRepo"), "access is gated"),
    "gated card": ("resolve", Answer(403, "GatedRepo"), "access is gated"),
    "no such branch": ("info", Answer(404, "RevisionNotFound"), "no such branch"),
    "disabled": ("info", Answer(403, message="Access to this resource is disabled."), "has disabled it"),
    "bad token, whoami": ("whoami", Answer(401), "does not accept the token"),
    "bad token, commit": (
        "commit", Answer(401, message="Invalid credentials in Authorization header"), "does not accept the token"
    ),
    "forbidden": ("commit", Answer(403, message="You need write access"), "neither write there.*You need write access"),
    "forbidden before the commit": ("preupload", Answer(403), "neither write there"),
    "not found at the commit": ("commit", Answer(404), "does not find it"),
    "conflict 409": ("commit", Answer(409), "somebody else changed"),
    "conflict 412": ("commit", Answer(412), "somebody else changed"),
    "metadata not valid": (
        "validate",
        Answer(400, body=json.dumps({"errors": [{"message": '"license" must be one of'}]}).encode()),
        'refuses the metadata.*"license" must be one of',
    ),
    "card not valid 422": ("validate", Answer(422, message="bad card"), "refuses the card as not valid.*bad card"),
    "commit not valid 422": ("commit", Answer(422), "refuses the card as not valid"),
    "commit not valid 400": ("commit", Answer(400, message="bad commit"), "refuses the card as not valid.*bad commit"),
    "too many requests": ("whoami", Answer(429), "too many requests"),
    "fault of the Hub": ("info", Answer(500), r"fault of its own \(500\)"),
    "fault of the Hub, card": ("resolve", Answer(503), r"fault of its own \(503\)"),
    "fault of the Hub, commit": ("commit", Answer(502), r"fault of its own \(502\)"),
    "fault of a proxy": ("validate", Answer(502, body=b"<html>"), "no JSON"),
    "answer of a proxy": ("info", Answer(200, body=b"<html>"), "no JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "answer", "says"), REFUSALS.values(), ids=REFUSALS.keys())
def test_each_refusal_has_its_own_message(hub: StandIn, endpoint: str, answer: Answer, says: str) -> None:
    hub.faults[endpoint] = answer
    with pytest.raises(HubError, match=says) as caught:
        at(MINE).push(edit)
    assert caught.value.exit_code == 4
    assert MINE in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert hub.repos[MINE].card() == CARD
    assert hub.repos[MINE].requests == []


@pytest.mark.parametrize("endpoint", ["info", "resolve", "whoami", "validate", "commit"])
def test_a_hub_that_hangs_is_given_up(hub: StandIn, endpoint: str) -> None:
    hub.faults[endpoint] = HANG
    started = time.monotonic()
    with pytest.raises(HubError, match="did not answer in time"):
        Hub(MINE, timeout=0.3).push(edit)
    assert time.monotonic() - started < 10
    assert hub.repos[MINE].card() == CARD


def test_a_hub_that_hangs_at_the_pull_requests_is_given_up(hub: StandIn) -> None:
    hub.faults["discussions"] = HANG
    with pytest.raises(HubError, match="did not answer in time"):
        Hub(THEIRS, timeout=0.3).push(edit)


def test_the_limit_is_gone_afterwards(hub: StandIn) -> None:
    from huggingface_hub.utils import get_session

    before = getattr(get_session(), "timeout", None)
    at(MINE).read()
    assert getattr(get_session(), "timeout", None) == before
    assert "request" not in vars(get_session())


def test_a_change_meanwhile_is_not_overwritten(hub: StandIn) -> None:
    def while_somebody_commits(content: bytes | None) -> bytes:
        hub.repos[MINE].commit("main", {"README.md": b"# Newer\n"})
        return edit(content)

    with pytest.raises(HubError, match=r"somebody else changed.*A commit has happened since"):
        at(MINE).push(while_somebody_commits)
    assert hub.repos[MINE].card() == b"# Newer\n"


def test_without_a_token(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    # What anybody may read can be compared without one.
    assert at(MINE).read().content == CARD
    with pytest.raises(HubError, match="needs a token"):
        at(MINE).push(edit)


def test_offline(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget_connections()
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        at(MINE).read()
    assert hub.log == []


def test_out_of_reach(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot be reached"):
        at(MINE).read()


def test_no_id(hub: StandIn) -> None:
    with pytest.raises(HubError, match="not the id of a model"):
        at("a--b/..").read()


@pytest.mark.parametrize(
    ("repo", "orgs", "expected"),
    [
        ("me/x", None, True),
        ("you/x", [], False),
        ("gpt2", [], False),
        ("lab/x", [{"name": "lab", "roleInOrg": "admin"}], True),
        ("lab/x", [{"name": "lab", "roleInOrg": "read"}], False),
        ("lab/x", [{"name": "lab"}], True),
        ("lab/x", [{"name": "other", "roleInOrg": "admin"}], False),
    ],
)
def test_who_may_write(repo: str, orgs: list[dict[str, str]] | None, expected: bool) -> None:
    assert may_write({"name": "me", "orgs": orgs}, repo) is expected
