from .index import CodeIndex
from .results import SearchResult
from .searching import CodeIndexes

__all__ = ["CodeIndex", "CodeIndexes", "SearchResult"]
