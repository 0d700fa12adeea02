from .index import CodeIndex
from .results import SearchResult

__all__ = ["CodeIndex", "SearchResult"]
