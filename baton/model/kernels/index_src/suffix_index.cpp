// A suffix automaton over a growing sequence of tokens: its longest suffix that occurred before, and where.
//
// Online construction (Blumer et al., 1985). Called through `baton/engine/drafts/native_suffix.py`; the reference is
// `baton/engine/drafts/suffix_automaton.py`, which it equals call by call. A state's first transition lies in the state;
// the others lie in one hash table and, for clones, in a list of each state. No call throws: -1 means out of memory.
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#define BATON_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kNone = -1, kRoot = 0;
constexpr int kUpdatedStates = 8;  // MAX_UPDATED_STATES of the reference

struct State {
    int32_t length, link, end;       // of the longest string; one past a recent occurrence
    int32_t token, target, edges;    // the first transition, and the first of the others
};

struct Edge {
    int32_t state, token, target, next;
};

class SuffixAutomaton {
public:
    SuffixAutomaton() : states_{{0, kNone, 0, kNone, kNone, kNone}}, slots_(16, kNone) {}

    void append(int32_t token) {
        tokens_.push_back(token);
        const int32_t end = size(), added = add_state(end, kNone, end);
        int32_t state = last_, target = kNone;
        while (state != kNone && (target = next(state, token)) == kNone) {
            set_next(state, token, added);
            state = states_[state].link;
        }
        if (state == kNone) {
            states_[added].link = kRoot;
        } else if (states_[target].length == states_[state].length + 1) {
            states_[added].link = target;
        } else {
            const int32_t clone = split(state, token, target);
            states_[added].link = clone;
        }
        last_ = added;
        find_match(end);
    }

    // Length of the longest suffix of a text of its own that occurs here, and one past an occurrence.
    void match(const int32_t* tokens, int64_t n, int64_t* found) const {
        int32_t state = kRoot;
        int64_t length = 0;
        for (int64_t i = 0; i < n; i++) {
            int32_t target = next(state, tokens[i]);
            while (target == kNone && state != kRoot) {
                state = states_[state].link;
                length = states_[state].length;
                target = next(state, tokens[i]);
            }
            if (target != kNone) state = target, length++;
        }
        found[0] = length, found[1] = states_[state].end;
    }

    // Tokens from `first` on, up to a negative one; what lies behind the end repeats them.
    int64_t continuation(int64_t first, int64_t max, int32_t* out) const {
        const int64_t period = size() - first;
        if (first < 0 || period <= 0) return 0;
        for (int64_t i = 0; i < max; i++) {
            out[i] = tokens_[first + i % period];
            if (out[i] < 0) return i;
        }
        return max;
    }

    int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
    int64_t match_length() const { return match_length_; }
    int64_t match_end() const { return match_end_; }
    int64_t bytes() const {
        return static_cast<int64_t>(tokens_.capacity() * 4 + states_.capacity() * sizeof(State) +
                                    edges_.capacity() * sizeof(Edge) + slots_.capacity() * 4);
    }

private:
    int32_t add_state(int32_t length, int32_t link, int32_t end) {
        states_.push_back({length, link, end, kNone, kNone, kNone});
        return static_cast<int32_t>(states_.size()) - 1;
    }

    // The place of an edge in the hash table, or the empty one where it belongs.
    size_t slot(int32_t state, int32_t token) const {
        const size_t mask = slots_.size() - 1;
        uint64_t hash = static_cast<uint32_t>(state) * 0x9E3779B97F4A7C15ull;
        hash = (hash ^ static_cast<uint32_t>(token)) * 0xC2B2AE3D27D4EB4Full;
        size_t at = static_cast<size_t>(hash >> 29) & mask;
        while (slots_[at] != kNone && (edges_[slots_[at]].state != state || edges_[slots_[at]].token != token))
            at = (at + 1) & mask;
        return at;
    }

    int32_t next(int32_t state, int32_t token) const {
        const State& from = states_[state];
        if (from.token == token) return from.target;
        if (from.edges == kNone) return kNone;
        const int32_t edge = slots_[slot(state, token)];
        return edge == kNone ? kNone : edges_[edge].target;
    }

    void set_next(int32_t state, int32_t token, int32_t target) {
        State& from = states_[state];
        if (from.target == kNone || from.token == token) {
            from.token = token, from.target = target;
            return;
        }
        size_t at = slot(state, token);
        if (slots_[at] != kNone) {
            edges_[slots_[at]].target = target;
            return;
        }
        if (2 * (edges_.size() + 1) > slots_.size()) {
            grow();
            at = slot(state, token);
        }
        slots_[at] = static_cast<int32_t>(edges_.size());
        edges_.push_back({state, token, target, from.edges});
        from.edges = slots_[at];
    }

    void grow() {
        slots_.assign(2 * slots_.size(), kNone);
        for (size_t edge = 0; edge < edges_.size(); edge++)
            slots_[slot(edges_[edge].state, edges_[edge].token)] = static_cast<int32_t>(edge);
    }

    // Takes the shorter strings out of `target` into a state of their own, which it returns.
    int32_t split(int32_t state, int32_t token, int32_t target) {
        const State from = states_[target];
        const int32_t clone = add_state(states_[state].length + 1, from.link, from.end);
        if (from.target != kNone) set_next(clone, from.token, from.target);
        for (int32_t edge = from.edges; edge != kNone; edge = edges_[edge].next)
            set_next(clone, edges_[edge].token, edges_[edge].target);
        while (state != kNone && next(state, token) == target) {
            set_next(state, token, clone);
            state = states_[state].link;
        }
        states_[target].link = clone;
        return clone;
    }

    // Reads the latest earlier occurrence of the longest repeated suffix; then this one is the latest.
    void find_match(int32_t end) {
        int32_t state = states_[last_].link;
        match_length_ = states_[state].length, match_end_ = states_[state].end;
        for (int i = 0; i < kUpdatedStates && state != kRoot; i++) {
            states_[state].end = end;
            state = states_[state].link;
        }
    }

    std::vector<int32_t> tokens_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_;  // a power of two, at most half full
    int32_t last_ = kRoot;
    int64_t match_length_ = 0, match_end_ = 0;
};

}  // namespace

BATON_API const char* baton_source_digest() { return BATON_SOURCE_DIGEST; }

BATON_API void* baton_suffix_new() {
    try {
        return new SuffixAutomaton();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

BATON_API void baton_suffix_free(void* index) { delete static_cast<SuffixAutomaton*>(index); }

// Adds `n` tokens. `match`: length and end of the longest suffix that occurred before. Returns 0.
BATON_API int64_t baton_suffix_append(void* index, const int32_t* tokens, int64_t n, int64_t* match) {
    auto* automaton = static_cast<SuffixAutomaton*>(index);
    try {
        for (int64_t i = 0; i < n; i++) automaton->append(tokens[i]);
    } catch (const std::bad_alloc&) {
        return -1;
    }
    match[0] = automaton->match_length(), match[1] = automaton->match_end();
    return 0;
}

// `found`: length and end of an occurrence of the longest suffix of `tokens` that is in the index.
BATON_API void baton_suffix_match(const void* index, const int32_t* tokens, int64_t n, int64_t* found) {
    static_cast<const SuffixAutomaton*>(index)->match(tokens, n, found);
}

BATON_API int64_t baton_suffix_continuation(const void* index, int64_t first, int64_t max, int32_t* out) {
    return static_cast<const SuffixAutomaton*>(index)->continuation(first, max, out);
}

BATON_API int64_t baton_suffix_bytes(const void* index) { return static_cast<const SuffixAutomaton*>(index)->bytes(); }
