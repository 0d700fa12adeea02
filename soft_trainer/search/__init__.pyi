from .code_index import CodeIndex
from .ranking.results import SearchResult
from .searching import CodeIndexes

__all__ = ["CodeIndex", "CodeIndexes", "SearchResult"]
