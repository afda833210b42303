// Division by numbers that are known when a kernel is launched.

using DivisorArgument = unsigned long long;

// Divides numbers below 2^31 by a multiplication. The argument has the divisor in its upper half,
// and in its lower one the multiplier that division.py computes.
struct Divisor {
  int value;
  unsigned multiplier;
  int shift;

  __device__ __forceinline__ explicit Divisor(DivisorArgument argument)
      : value(static_cast<int>(argument >> 32)),
        multiplier(static_cast<unsigned>(argument)),
        shift(32 - __clz(value - 1)) {}

  // Returns the quotient, and makes `number` the remainder.
  __device__ __forceinline__ unsigned split(unsigned& number) const {
    const auto high =
        static_cast<unsigned>(static_cast<unsigned long long>(number) * multiplier >> 32);
    const unsigned quotient = (high + number) >> shift;
    number -= quotient * value;
    return quotient;
  }
};
