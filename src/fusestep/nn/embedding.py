"""Embedding: torch's module with a gradient whose sums are in a fixed order."""

from __future__ import annotations

from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.ops.embedding import embedding, explain


class Embedding(nn.Embedding):
    """torch.nn.Embedding whose gradient has the same bits each time, summed in fp32 and rounded once.

        token, position = Embedding(50304, 768), Embedding(1024, 768)
        x = token(ids, positions=position.weight)      # token(ids) + position(places), in one pass

    Arguments, parameters and state dict are those of torch.nn.Embedding. With max_norm, scale_grad_by_freq or sparse it
    runs as torch's, which is announced.
    """

    def forward(self, input: Tensor, *, positions: Tensor | None = None) -> Tensor:  # noqa: A002
        """Rows of the table, of shape (*input.shape, embedding_dim).

        Args:
            input: ids of any shape, int64 or int32.
            positions: (places, embedding_dim), of which a row is added to each token for its place in the last
                dimension of input.
        Raises: UserError as fusestep.nn.functional.embedding.
        """
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            positions=positions,
        )

    def implementation(self) -> Choice:
        """What it runs as on the device of its table, and why."""
        return explain(self.weight, is_left=self.max_norm is not None or self.scale_grad_by_freq or self.sparse)
