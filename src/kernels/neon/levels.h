#include "kernels/body/levels_of_16.h"
