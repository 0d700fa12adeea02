from .code_index import CodeIndex as CodeIndex
from .ranking.results import SearchResult as SearchResult
from .searching import Search as Search

__all__ = ["CodeIndex", "Search", "SearchResult"]
