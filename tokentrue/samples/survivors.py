"""Which nodes does training see? Everything that was sampled, except what is known to have been given up, each with its
reason.

* `retried`: the same turn was asked again after this answer was complete, and this answer was never continued.
* `rolled_back`: it had been continued, then the agent went back and asked the same turn again.
* `not_chosen`: another answer to the same turn was continued (n > 1, requests in flight together, or an earlier answer
  after all).
* `disconnected`, `engine_failed`, `deleted`, `aborted`: the client never got the whole of it, and nothing follows.

Giving up reaches down: what follows a given-up node is given up for the same reason. A reward on the leaf itself speaks
for it:
such a leaf, and the path to it, is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Finish


def find_left_out(tree: Tree, rewarded: Collection[str] = ()) -> dict[str, str]:
    """Node id -> reason, for every node that is left out of training."""
    rewarded_paths = {node.id for leaf in rewarded if leaf in tree.nodes for node in tree.path(tree.nodes[leaf])}
    newest = tree.last_activity()
    reasons: dict[str, str] = {}
    for answers in tree.answers.values():
        if len(answers) > 1:
            reasons |= {
                node_id: why for node_id, why in _losers(tree, answers, newest).items() if node_id not in rewarded_paths
            }
    for node in tree.in_order():  # parents come before children
        given_up = [reasons[before] for before in tree.predecessors(node) if before in reasons]
        if given_up and node.id not in rewarded_paths and node.id not in reasons:
            reasons[node.id] = given_up[0]
    for node in reversed(tree.in_order()):
        alive = any(child.id not in reasons for child in tree.followers.get(node.id, ()))
        if not alive and node.id not in reasons and node.id not in rewarded_paths and (why := _unserved_reason(node)):
            reasons[node.id] = why
    return reasons


def _unserved_reason(node: Node) -> str | None:
    if node.outcome != "served":
        return node.outcome
    return "aborted" if node.finish is Finish.ABORT else None


def _losers(tree: Tree, answers: list[Node], newest: dict[str, int]) -> dict[str, str]:
    """Of several answers to one turn the one with the latest activity survives, and every parallel one that was
    continued."""
    served = [node for node in answers if _unserved_reason(node) is None or tree.followers.get(node.id)]
    if not served:
        return {}
    survivor = max(served, key=lambda node: newest[node.id])
    any_followed = any(tree.followers.get(node.id) for node in served)
    losers: dict[str, str] = {}
    for node in answers:
        followed = bool(tree.followers.get(node.id))
        if node is survivor or (not followed and _unserved_reason(node)):
            continue
        if any(later.started > newest[node.id] for later in served):
            losers[node.id] = "rolled_back" if followed else "retried"
        elif any(later.started > node.seq for later in served) and not followed:
            losers[node.id] = "retried"
        elif any_followed and not followed:
            losers[node.id] = "not_chosen"
    return losers
