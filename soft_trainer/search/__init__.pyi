from .code_index import CodeIndex as CodeIndex
from .ranking.results import SearchResult as SearchResult
from .searching import CodeIndexes as CodeIndexes

__all__ = ["CodeIndex", "CodeIndexes", "SearchResult"]
