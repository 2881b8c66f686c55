"""A round's tree in the log, for who runs vLLM with VLLM_LOGGING_LEVEL=DEBUG."""

from torch import Tensor

from vllm_dartree.engine.state import TreeStep


def describe_round(step: TreeStep, input_ids: Tensor) -> str:
    """The tree of the batch's first request: a line per node, indented by depth, ``*`` where it was accepted.

    Reads the device, hence waits for it.

    Args:
        step: with ``accepted`` set by the sampler.
        input_ids: of the flat batch.
    """
    num_nodes = int(step.num_nodes[0])
    parents, depths = step.parents[0].tolist(), step.topology.depths[0].tolist()
    ids = input_ids[step.tokens[: num_nodes + 1]].tolist()
    accepted = set(step.accepted.path[0].tolist())
    children: dict[int, list[int]] = {}
    for row in range(1, num_nodes + 1):
        children.setdefault(parents[row], []).append(row)
    lines, waiting = [], [0]
    while waiting:
        row = waiting.pop()
        lines.append(f"{'  ' * depths[row]}{ids[row]}{' *' * (row in accepted)}")
        waiting += reversed(children.get(row, []))
    return f"DARTree round at position {int(step.roots[0])}, accepted nodes are starred:\n" + "\n".join(lines)
