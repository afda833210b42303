// A kernel for one to three tensors takes (PARAMETERS(0) SECOND THIRD), the parameters of TENSORS.

#if TENSORS > 1
#define SECOND , PARAMETERS(1)
#else
#define SECOND
#endif
#if TENSORS > 2
#define THIRD , PARAMETERS(2)
#else
#define THIRD
#endif
