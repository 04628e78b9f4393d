"""Scores and reranking for jackfield: `/score`, and `/rerank` as Cohere and Jina shape it. Two endpoints, an entry point each."""

from jackfield_score.rerank import RerankEndpoint
from jackfield_score.score import ScoreEndpoint

__all__ = ["RerankEndpoint", "ScoreEndpoint"]
