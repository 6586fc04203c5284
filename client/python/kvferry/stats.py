"""What an OffloadedCache reports about itself."""

from dataclasses import dataclass

from .sizes import format_size


@dataclass(frozen=True)
class CacheStats:
    """Figures of one cache, counted since it was made (a copy starts at zero). Prints as a table.

    Bytes are bytes, times are seconds. A block is the keys and values of one layer, one row of the batch and
    `block_tokens` tokens.
    """

    device_bytes: int  #: held on the device now: buffers, tails, received blocks, windows and states
    device_bytes_peak: int  #: the most there ever was of them
    stored_bytes: int  #: blocks of this cache that lie in the store
    blocks_put: int  #: blocks the store has acknowledged
    bytes_put: int
    blocks_got: int  #: blocks read back
    bytes_got: int
    refused: int  #: chunks the store had no room for
    plain_layers: int  #: layers that stay on the device: gradients flow through them, or they were assigned
    relearned: int  #: times the shapes of later layers differed from those expected
    layers_on_device: int  #: layers with full blocks on the device: resident, in the ring or on their way
    resident_layers: int  #: layers that are kept on the device now
    prefetch_depth: int  #: layers read ahead
    seconds_waited: float  #: for blocks that had not arrived and for acknowledgements
    seconds_copying: float  #: packing and gathering blocks

    def __str__(self) -> str:
        rows = [
            ("bytes on the device", f"{format_size(self.device_bytes)} (peak {format_size(self.device_bytes_peak)})"),
            ("bytes in the service", format_size(self.stored_bytes)),
            ("blocks put", f"{self.blocks_put:,} ({format_size(self.bytes_put)})"),
            ("blocks got", f"{self.blocks_got:,} ({format_size(self.bytes_got)})"),
            ("layers on the device", f"{self.layers_on_device} with full blocks; {self.resident_layers} may stay, "
                                     f"{self.prefetch_depth} are read ahead"),
            ("seconds waited", f"{self.seconds_waited:.3f}"),
            ("seconds copying", f"{self.seconds_copying:.3f}"),
        ]  # fmt: skip
        for name in ("refused", "plain_layers", "relearned"):
            if getattr(self, name):
                rows.append((name.replace("_", " "), f"{getattr(self, name):,}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
