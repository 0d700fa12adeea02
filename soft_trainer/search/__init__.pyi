from .code_index import CodeIndex as CodeIndex
from .ranking.results import SearchResult as SearchResult

__all__ = ["CodeIndex", "SearchResult"]
