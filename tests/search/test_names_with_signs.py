"""The filter `name` finds names as people write them, with or without signs."""

import pytest

from soft_trainer.search import CodeIndex

VECTOR = """class Vec {
  explicit operator bool() const { return n > 0; }
  operator const char*() const noexcept { return p; }
  int& operator[](int i) { return p[i]; }
  bool operator==(const Vec& o) const { return n == o.n; }
  Vec& operator = (const Vec& o) { return *this; }
  void operator()(int x) const { f(x); }
  void* operator new(size_t s) { return malloc(s); }
  void operator delete[](void* p) { free(p); }
  Vec* operator->() { return this; }
  ~Vec() { n = 0; }
};
Vec::operator int() const { return 1; }
Vec& Vec::operator+=(const Vec& o) { n += o.n; return *this; }
struct Any {
  operator Foo<int>() { return 1; }
  operator Foo<bool>() { return 2; }
};
std::ostream& operator<<(std::ostream& s, const Vec& v) { return s; }
"""
RUBY = """class Cart
  def ==(other)
    other.class == Cart
  end

  def [](name)
    @items[name]
  end

  def valid
    @valid
  end

  def valid?
    @valid.all?
  end

  def total=(value)
    @total = value
  end

  def save
    valid
  end

  def save!
    save || raise(Invalid)
  end
end

class M
  def save!
    save
  end
end
"""
FOUND = {
    "Vec.operator[]": ["Vec.operator[]"],
    "operator[]": ["Vec.operator[]"],
    "Vec::operator ==": ["Vec.operator=="],
    "Vec.operator=": ["Vec.operator="],
    "operator bool": ["Vec.operator bool"],
    "Vec::operator const char *": ["Vec.operator const char*"],
    "Vec::operator int": ["Vec.operator int"],
    "Vec.operator()": ["Vec.operator()"],
    "Vec.operator new": ["Vec.operator new"],
    "operator delete[]": ["Vec.operator delete[]"],
    "Vec.operator->": ["Vec.operator->"],
    "operator <<": ["operator<<"],
    "Vec.~Vec": ["Vec.~Vec"],
    "operator+=": ["Vec.operator+="],
    "operator Foo<int>": ["Any.operator Foo<int>"],
    "Any::operator Foo<bool>": ["Any.operator Foo<bool>"],
    "save!": ["Cart.save!", "M.save!"],
    "M#save!": ["M.save!"],
    "Vec.operator+": [],
    "Vec.operator!=": [],
    "Cart.==": ["Cart.=="],
    "Cart#[]": ["Cart.[]"],
    "Cart#valid?": ["Cart.valid?"],
    "valid?": ["Cart.valid?"],
    "valid()": ["Cart.valid", "Cart.valid?"],
    "valid": ["Cart.valid", "Cart.valid?"],
    "total=": ["Cart.total="],
    "cart->total": ["Cart.total="],
    "Cart.*=": ["Cart.==", "Cart.total="],
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    (tree / "vec.cpp").write_text(VECTOR)
    (tree / "cart.rb").write_text(RUBY)
    return CodeIndex.build(tree, tmp_path_factory.mktemp("indexed") / "index", model="none")


@pytest.mark.parametrize("name", FOUND)
def test_a_name_with_signs_finds_only_itself(index, name):
    found = index.search("vec cart operator valid total other save", 50, name=name)
    assert sorted(result.name for result in found) == FOUND[name]


@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if found and "*=" not in name])
def test_a_query_that_is_a_name_with_signs_finds_it_first(index, name):
    found = [result.name for result in index.search(name)]
    assert sorted(found[: len(FOUND[name])]) == FOUND[name]
