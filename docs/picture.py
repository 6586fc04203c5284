"""Draws docs/data-path.svg, the README's picture (`./dev picture`). Colours follow the reader's light or dark mode."""

WIDTH, HEIGHT = 960, 440

STYLE = """
  text { font: 14px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933 }
  .title { font-size: 16px; font-weight: 600 }
  .note { font-size: 13px; fill: #52606d }
  .mono { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace }
  .frame { fill: none; stroke: #7b8794; stroke-width: 1.5 }
  .cell { fill: none; stroke: #9aa5b1 }
  .resident { fill: #2f6fdb; stroke: #2f6fdb }
  .ring { fill: #e08a1e; stroke: #e08a1e }
  .tail { fill: #8aa9dd; stroke: #8aa9dd }
  .stored { fill: #1b998b; stroke: #1b998b }
  .free { fill: none; stroke: #9aa5b1; stroke-dasharray: 3 3 }
  .put { stroke: #1b998b; stroke-width: 2.5; fill: none } .put-head { fill: #1b998b }
  .get { stroke: #e08a1e; stroke-width: 2.5; fill: none } .get-head { fill: #e08a1e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .note { fill: #9aa5b1 }
    .frame { stroke: #7b8794 } .cell, .free { stroke: #616e7c }
    .resident { fill: #5b93f0; stroke: #5b93f0 } .tail { fill: #41629c; stroke: #41629c }
    .ring { fill: #f0a644; stroke: #f0a644 } .stored { fill: #3fbfae; stroke: #3fbfae }
    .put { stroke: #3fbfae } .put-head { fill: #3fbfae } .get { stroke: #f0a644 } .get-head { fill: #f0a644 }
  }
"""

LAYERS, RESIDENT, IN_RING = 15, 3, 8  # of the drawing: how many, how many stay, which one is being used
CHUNKS, USED = 9, 7
SLOTS = 8


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{f" class={kind!r}" if kind else ""}>{content}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" class="{kind}"/>'


def arrow(x1: float, x2: float, y: float, kind: str) -> str:
    """A horizontal arrow from x1 to x2."""
    back = 11 if x2 > x1 else -11
    return (f'<path d="M{x1} {y}H{x2 - back}" class="{kind}"/>'
            f'<path d="M{x2} {y}l{-back} -6v12z" class="{kind}-head"/>')


def model_process() -> list[str]:
    parts = [box(20, 20, 400, 400, "frame", 8), text(40, 50, "Model process", "title"),
             text(40, 76, "model.generate(..., cache=cache)", "mono"),
             text(40, 116, "KV of each layer: full blocks of T tokens")]
    step, width, top, height = 24, 19, 130, 110
    for layer in range(LAYERS):
        kind = "resident" if layer < RESIDENT else "ring" if layer == IN_RING else "free"
        x = 40 + layer * step
        parts.append(box(x, top, width, height, kind))
        parts.append(box(x, top + height + 8, width, 16, "tail"))
    ring = 40 + IN_RING * step
    parts += [text(40, 284, "tail: the last tokens of every layer, always here", "note"),
              box(40, 305, 14, 14, "resident"), text(62, 317, "R layers that stay on the device"),
              box(40, 331, 14, 14, "ring"), text(62, 343, "ring: the layer that attention is reading"),
              box(40, 357, 14, 14, "free"), text(62, 369, "in the store, not in this process"),
              text(40, 402, "device_memory is a hard bound", "note")]
    assert ring + width < 420
    return parts


def store() -> list[str]:
    parts = [box(640, 20, 300, 400, "frame", 8), text(660, 50, "kvferryd", "title"),
             text(922, 50, "or the same, in process", "note", "end"),
             text(660, 82, "index, sessions, leases"),
             text(660, 116, "memory tier: chunks in segments")]
    step, width, top, height = 29, 23, 130, 134
    slot = height / SLOTS
    for chunk in range(CHUNKS):
        x = 660 + chunk * step
        if chunk >= USED:
            parts.append(box(x, top, width, height, "free"))
            continue
        parts += [box(x, top + line * slot + 1, width, slot - 3, "stored", 1) for line in range(SLOTS)]
    parts += [text(660, 284, "a column: T tokens of one row", "note"),
              box(660, 305, 14, 14, "stored"), text(682, 317, "block: one layer, checksummed"),
              text(660, 343, "chunk: the blocks of all layers,"),
              text(660, 361, "immutable, one extent of memory"),
              text(660, 402, "--memory is a hard budget", "note")]
    return parts


def between() -> list[str]:
    middle = 530
    return [text(middle, 118, "each full block once,", "", "middle"),
            text(middle, 136, "acknowledged one by one", "", "middle"),
            arrow(432, 628, 152, "put"), text(middle, 172, "Put", "mono", "middle"),
            text(middle, 232, "ahead of the layer", "", "middle"), text(middle, 250, "that needs them", "", "middle"),
            arrow(628, 432, 266, "get"), text(middle, 286, "Get", "mono", "middle"),
            text(middle, 330, "Transport", "title", "middle"), text(middle, 352, "in process", "", "middle"),
            text(middle, 372, "gRPC: unix socket, TCP", "", "middle")]


def picture() -> str:
    shapes = "\n".join(model_process() + between() + store())
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="A model process and kvferryd: full blocks of KV go to the store once, and come back ahead of '
            f'the layer that needs them">\n<style>{STYLE}</style>\n{shapes}\n</svg>')


if __name__ == "__main__":
    print(picture())
